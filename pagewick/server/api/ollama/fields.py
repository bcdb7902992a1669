"""The requests of Ollama's API."""

from __future__ import annotations

import re
from typing import Any, Literal

from msgspec import Raw, Struct

from pagewick.errors import InvalidRequestError, UnsupportedError
from pagewick.pooling_params import PoolingParams
from pagewick.server.api.known_fields import KnownFields
from pagewick.server.api.ollama.conversation import OllamaMessage, is_continued, messages_of
from pagewick.server.api.request_fields import SamplingFields
from pagewick.server.api.tool_fields import Tool, tools_of
from pagewick.server.core.limits import MAX_INPUTS, MAX_MESSAGES, check_count
from pagewick.server.core.request import ChatRequest, PromptsRequest, Template, Thinking
from pagewick.server.core.thinking import ThinkingModel
from pagewick.structured_outputs import StructuredOutputsParams

# How Ollama loads a model and spends the machine, and num_keep, which counts only where a full context is shifted.
_OF_THE_SERVER = frozenset({
    "embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu", "num_batch", "num_gpu", "num_keep", "num_thread",
    "numa", "use_mlock", "use_mmap", "vocab_only",
})  # fmt: skip
_REASONS = {
    "template": "is not supported: this server does not run templates of requests; send a raw prompt",
    "context": "is not supported: send the conversation to /api/chat, whose prefix is cached",
    **dict.fromkeys(("width", "height", "steps"), "needs a model that draws; this one writes text"),
}
_NOTHING = Raw()
_EMPTY = re.compile(rb'\s*(null|\[\s*\]|"")?\s*')
# A duration of 0 in the grammar of Go's time.ParseDuration: several numbers with units may follow each other.
_ZERO = re.compile(r"[-+]?(0|((0+(\.0*)?|\.0+)(ns|us|\u00b5s|\u03bcs|ms|s|m|h))+)")
# keep_alive: a model stays loaded as the server's settings say. insecure: nothing is downloaded.
OLLAMA_FIELDS = KnownFields(
    unsupported={"template": ("",), "context": ([],), "width": (0,), "height": (0,), "steps": (0,)},
    harmless=frozenset({"keep_alive", "insecure"}),
    in_messages=frozenset(OllamaMessage.__struct_fields__),
    inside={
        "options": _OF_THE_SERVER,
        "messages[].tool_calls[]": frozenset({"type"}),
        "messages[].tool_calls[].function": frozenset({"index", "description"}),
        "tools[].function": frozenset({"cache_control"}),
    },
    reasons=_REASONS,
)

Format = Literal["", "json"] | dict[str, Any]


class Options(SamplingFields, kw_only=True):
    """Sampling parameters; Ollama's names for them are llama.cpp's.

    num_predict: upper limit of new tokens; below 0: none. num_ctx: size of the context, which the server determines.
    """

    num_predict: int | None = None
    num_ctx: int | None = None


class ModelFields(Struct, kw_only=True):
    """model: a name of the model, with or without `:latest`; the default is the model that is served.

    options: how to sample. keep_alive: 0 without a prompt unloads a model of several; otherwise the settings decide.
    """

    model: str | None = None
    options: Options | None = None

    def ignored_options(self, max_model_len: int) -> list[str]:
        """Return the options that ask for what the server cannot do."""
        wanted = None if self.options is None else self.options.num_ctx
        return ["options.num_ctx"] if wanted is not None and wanted > max_model_len else []


class GeneratingFields(ModelFields, kw_only=True):
    """stream: false sends the response at once. format: json, or a JSON schema. logprobs: report log-probabilities.

    think: whether the model thinks, or how much. top_logprobs: the number of alternatives for each token.
    """

    stream: bool | None = None
    format: Format | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")

    @property
    def is_stream(self) -> bool:
        return self.stream is not False

    def ignored_names(self, model: ThinkingModel, max_model_len: int) -> list[str]:
        """Return the names of fields that have no effect with this model."""
        names = self.ignored_options(max_model_len)
        if self.think not in (None, False) and not (model.has_thoughts or model.has_switch):
            names.append("think")
        return names

    def text_fields(self) -> dict[str, Any]:
        """Return the fields that TextRequest has with the same meaning. Raises InvalidRequestError."""
        options = self.options or Options()
        sampling = options.sampling()
        if options.num_predict is not None:
            sampling["max_tokens"] = None if options.num_predict < 0 else options.num_predict
        if options.seed is not None and options.seed < 0:
            del sampling["seed"]
        if self.logprobs:
            sampling["logprobs"] = self.top_logprobs or 0
        if self.format:
            sampling["structured_outputs"] = _form(self.format)
        names = {name: f"options.{name}" for name in SamplingFields.__struct_fields__}
        names |= {"max_tokens": "options.num_predict", "repetition_penalty": "options.repeat_penalty"}
        names |= {"logprobs": "top_logprobs", "structured_outputs": "format"}
        return {"is_stream": self.is_stream, "sampling": sampling, "names": names, "lowers_max_tokens": True}

    def thinking(self) -> Thinking:
        if isinstance(self.think, str):
            return Thinking(True, self.think)
        return Thinking(self.think)


class OllamaChatRequest(GeneratingFields, kw_only=True):
    """messages: the conversation; without any, the model is only loaded. tools: those that the model may call."""

    messages: list[OllamaMessage] | None = None
    tools: list[Tool] | None = None

    @property
    def only_loads(self) -> bool:
        return not self.messages

    def chat_request(self, *, reads_images: bool) -> ChatRequest:
        """Make the core's request. Raises InvalidRequestError."""
        messages = self.messages or []
        check_count("messages", len(messages), MAX_MESSAGES)
        return ChatRequest(
            **self.text_fields(),
            messages=messages_of(messages, reads_images=reads_images),
            template=Template(continue_final_message=is_continued(messages)),
            thinking=self.thinking(),
            tools=tools_of(self.tools, None),
        )


class OllamaGenerateRequest(GeneratingFields, kw_only=True):
    """prompt: the user's text; without one, the model is only loaded. system: instructions. images: files in base64.

    raw: continue the prompt as it is, without the model's template. suffix: text that follows the wanted text.
    """

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    images: list[str] | None = None
    raw: bool | None = None

    @property
    def only_loads(self) -> bool:
        return not self.prompt and not self.images

    @property
    def is_plain(self) -> bool:
        """Whether the prompt goes to the model without a template."""
        return bool(self.raw or self.suffix)

    def unused_names(self) -> list[str]:
        """Return the names of fields that have no effect without a template."""
        of_templates = {"system": bool(self.system), "think": self.think is not None}
        return [name for name, is_given in of_templates.items() if is_given]

    def prompts_request(self) -> PromptsRequest:
        """Make the core's request of one without a template. Raises InvalidRequestError."""
        if self.images:
            message = (
                "images need a chat template, which some models, raw prompts and suffixes go without; leave them out"
            )
            raise UnsupportedError(message, param="images")
        return PromptsRequest(**self.text_fields(), prompts=[self.prompt or ""], suffix=self.suffix or None)

    def chat_request(self, *, reads_images: bool) -> ChatRequest:
        """Make the core's request of one with a template. Raises InvalidRequestError."""
        messages = [OllamaMessage(role="system", content=self.system)] if self.system else []
        messages.append(OllamaMessage(role="user", content=self.prompt or "", images=self.images))
        return ChatRequest(
            **self.text_fields(),
            messages=messages_of(messages, reads_images=reads_images, are_given=False),
            thinking=self.thinking(),
        )


class UnloadRequest(Struct):
    """The fields of a request to /api/chat or /api/generate that tell whether it only asks to unload the model.

    The fields that may be long are kept undecoded.
    """

    model: str | None = None
    keep_alive: float | str | None = None
    messages: Raw = _NOTHING
    prompt: Raw = _NOTHING
    images: Raw = _NOTHING

    @property
    def only_unloads(self) -> bool:
        if not all(_EMPTY.fullmatch(bytes(given)) for given in (self.messages, self.prompt, self.images)):
            return False
        return bool(_ZERO.fullmatch(self.keep_alive)) if isinstance(self.keep_alive, str) else self.keep_alive == 0


class OllamaEmbedRequest(ModelFields, kw_only=True):
    """input: a text, or several. truncate: false refuses a text that does not fit; otherwise its end is cut.

    dimensions: the first numbers of each vector, for models that were trained for it.
    """

    input: str | list[str]
    truncate: bool | None = None
    dimensions: int | None = None

    def params(self) -> PoolingParams:
        return PoolingParams(dimensions=self.dimensions)

    def prompts_request(self) -> PromptsRequest:
        """Make the core's request. Raises InvalidRequestError."""
        texts = [self.input] if isinstance(self.input, str) else self.input
        check_count("input", len(texts), MAX_INPUTS)
        name = "input" if isinstance(self.input, str) else "input[]"
        return embedding_request(texts, self.params(), name, is_cut=self.truncate is not False)


class OllamaEmbeddingsRequest(ModelFields, kw_only=True):
    """prompt: a text."""

    prompt: str

    def params(self) -> PoolingParams:
        # This route, unlike /api/embed, has vectors as the model makes them.
        return PoolingParams(normalize=False)

    def prompts_request(self) -> PromptsRequest:
        """Make the core's request. Raises InvalidRequestError."""
        return embedding_request([self.prompt], self.params(), "prompt", is_cut=True)


class ModelRequest(Struct, kw_only=True):
    """model: a name of the model. name: its former name. verbose: no effect. stream: as for chats."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None
    stream: bool | None = None


def embedding_request(texts: list[str], params: PoolingParams, name: str, *, is_cut: bool) -> PromptsRequest:
    """Return the core's request for vectors of texts. name: the client's name of one, `[]` for its place in a list."""
    for place, text in enumerate(texts):
        if not text:
            where = name.replace("[]", f"[{place}]")
            raise InvalidRequestError(f"{where} is empty; give a text", param=where)
    return PromptsRequest(
        sampling={"max_tokens": 0, "temperature": 0.0, "seed": 0},
        names={"prompt": name.removesuffix("[]"), "prompt[]": name, "truncate_prompt_tokens": "truncate"},
        truncate_prompt_tokens=-1 if is_cut else None,
        prompts=texts,
        pooling=params,
    )


def _form(wanted: Format) -> StructuredOutputsParams:
    values: dict[str, Any] = {"json_object": True} if isinstance(wanted, str) else {"json": wanted}
    try:
        form = StructuredOutputsParams.of(values)
    except InvalidRequestError as error:
        message = str(error) if str(error).startswith("format") else f"format: {error}"
        raise InvalidRequestError(message, param="format") from None
    assert form is not None, "there are values"
    return form
