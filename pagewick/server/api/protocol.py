"""The supported requests of the OpenAI API: one struct per route.

Field names are OpenAI's, and for further fields vLLM's and llama.cpp's; docs/api.md explains each.
"""

from __future__ import annotations

import re
from typing import Any, Literal, cast

from msgspec import Struct

from pagewick.errors import ContextLengthError, InvalidRequestError
from pagewick.server.api.conversation_fields import (
    ReasoningEffort,
    ThinkingOption,
    budget_name,
    template_of,
    thinking_of,
)
from pagewick.server.api.messages import ChatMessage, plain_messages
from pagewick.server.api.request_fields import one_of
from pagewick.server.api.structured_fields import StructuredFields
from pagewick.server.api.tool_fields import FunctionTool, NamedFunction, Tool, choice_of, tools_of
from pagewick.server.core.limits import MAX_MESSAGES, MAX_SEQUENCES, check_choices, check_count
from pagewick.server.core.request import ChatRequest, PromptsRequest

DEFAULT_COMPLETION_TOKENS = 16
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class StreamOptions(Struct):
    """include_usage: send the usage in a last chunk. include_obfuscation: no effect here.

    continuous_usage_stats: vLLM's; send the usage so far in every chunk.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(StructuredFields, kw_only=True):
    """Fields that chat and completions have in common.

    model: a name of the model; the default is the model that is served.
    stream: send the response as it is generated. stream_options: what the stream has beside that.
    request_id: end of the response's id. return_token_ids: also return the token ids of the prompt and of each choice.
    echo: begin the response with the prompt, or with the assistant's last message.
    add_special_tokens: add the tokenizer's special tokens, by default to completions only.
    truncate_prompt_tokens: keep this number of tokens from the end of the prompt; -1: as many as the context allows.
    n_predict: llama.cpp's name for max_tokens; -1: no limit. n_probs: its name for the number of logprobs.
    timings_per_token: also return llama.cpp's timings.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: str | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    n_predict: int | None = None
    n_probs: int | None = None
    timings_per_token: bool | None = None

    def __post_init__(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream: true", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequestError("prompt_logprobs cannot be streamed", param="prompt_logprobs")
        if self.request_id is not None and not _REQUEST_ID.fullmatch(self.request_id):
            message = "request_id must be 1 to 128 letters, digits and characters of _ . : -"
            raise InvalidRequestError(message, param="request_id")
        one_of(max_tokens=self.max_tokens, n_predict=self.n_predict)

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_usage_always(self) -> bool:
        options = self.stream_options
        return options is not None and bool(options.include_usage and options.continuous_usage_stats)

    def text_fields(self) -> dict[str, Any]:
        """Return the fields that TextRequest has with the same meaning."""
        return {
            "is_stream": bool(self.stream),
            "serving": self.serving(),
            "truncate_prompt_tokens": self.truncate_prompt_tokens,
            "add_special_tokens": self.add_special_tokens,
        }

    def sampling(self, **more: Any) -> dict[str, Any]:
        """Also return the wish for no limit, which overrides a server's limit. Raises InvalidRequestError."""
        given = super().sampling(**more)
        return {"max_tokens": None, **given} if self.n_predict == -1 else given

    def names(self) -> dict[str, str]:
        """Return TextRequest.names."""
        names = super().names()
        if self.n_predict is not None:
            names["max_tokens"] = "n_predict"
        if self.n_probs is not None:
            names["logprobs"] = "n_probs"
        return names

    @property
    def num_new_tokens(self) -> int | None:
        """Value of max_tokens under either name; None is no limit."""
        return self.max_tokens if self.n_predict in (None, -1) else self.n_predict


class ChatCompletionRequest(GenerationRequest, kw_only=True):
    """messages: the conversation. max_completion_tokens: max_tokens; it wins over the other names.

    logprobs: report log-probabilities of the content. top_logprobs: for this number of alternatives, too.
    thinking_budget, thinking_token_budget, reasoning_budget: upper limit of tokens of thought; -1: no limit.
    include_reasoning: false leaves the thoughts out of the response.
    reasoning_format: none leaves the thoughts in the content.
    record_conversation: keep the messages of the session, so that the next request sends only new ones.
    tools: functions that the model may call. tool_choice: none, auto, required, one function, or some of them.
    parallel_tool_calls: false allows one call per response. functions, function_call: former names, with one call.
    server_tools: false does not offer the tools that the server runs itself; a list offers those that it names.
    """

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    enable_thinking: bool | None = None
    thinking: bool | ThinkingOption | None = None
    reasoning_effort: ReasoningEffort | None = None
    thinking_budget: int | None = None
    thinking_token_budget: int | None = None
    reasoning_budget: int | None = None
    include_reasoning: bool | None = None
    reasoning_format: Literal["none", "auto", "deepseek"] | None = None

    record_conversation: bool | None = None

    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[FunctionTool] | None = None
    function_call: Literal["none", "auto"] | NamedFunction | None = None
    server_tools: bool | list[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("messages", len(self.messages), MAX_MESSAGES)
        if self.n_probs is not None and (self.logprobs is not None or self.top_logprobs is not None):
            raise InvalidRequestError("n_probs is another name of top_logprobs; give one of them", param="n_probs")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs or self.n_probs)

    @property
    def is_legacy(self) -> bool:
        """Whether the client knows calls in their former form only."""
        return bool(self.functions)

    def names(self) -> dict[str, str]:
        """Return TextRequest.names."""
        names = {"logprobs": "top_logprobs", **super().names()}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if (budget := budget_name(self)) is not None:
            names["thinking_budget"] = budget
        if self.is_legacy:
            names |= {"tools[].function": "functions[]", "tools": "functions"}
        if self.function_call is not None:
            names["tool_choice"] = "function_call"
        return names

    def chat_request(self) -> ChatRequest:
        """Make the core's request. Without max_tokens the context is the limit. Raises InvalidRequestError."""
        return ChatRequest(
            **self.text_fields(),
            sampling=self.sampling(
                max_tokens=self.num_new_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
                logprobs=(self.top_logprobs or self.n_probs or 0) if self.wants_logprobs else None,
            ),
            names=self.names(),
            messages=plain_messages(self.messages),
            template=template_of(self),
            thinking=thinking_of(self),
            splits_reasoning=self.reasoning_format != "none",
            records=self.record_conversation,
            tools=tools_of(self.tools, self.functions),
            tool_choice=choice_of(
                self.tool_choice,
                self.function_call,
                is_parallel=self.parallel_tool_calls,
                is_legacy=self.is_legacy,
            ),
        )


class CompletionRequest(GenerationRequest, kw_only=True):
    """prompt: a text, several, token ids, or several lists of them. suffix: generate the text up to the suffix.

    max_tokens: upper limit of new tokens, by default 16. logprobs: alternatives of each token to report.
    max_completion_tokens: as in chats, since clients send one body to both routes; it wins over the other names.
    """

    prompt: str | list[str | int | list[int]]
    max_completion_tokens: int | None = None
    suffix: str | None = None
    logprobs: int | None = None
    best_of: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(logprobs=self.logprobs, n_probs=self.n_probs)
        if self.stream and (self.best_of or 1) > (self.n or 1):
            raise InvalidRequestError("best_of cannot be streamed when it is above n", param="best_of")
        if self.suffix:
            for name in ("echo", "truncate_prompt_tokens", "add_special_tokens"):
                if getattr(self, name):
                    raise InvalidRequestError(f"suffix cannot be combined with {name}", param="suffix")

    @property
    def num_logprobs(self) -> int | None:
        """Number of log-probabilities; None if the request asks for none, as it does with llama.cpp's n_probs 0."""
        return self.logprobs if self.logprobs is not None else self.n_probs or None

    def names(self) -> dict[str, str]:
        """Return TextRequest.names."""
        names = {"messages": "prompt", **super().names()}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names

    def prompts(self, max_model_len: int) -> list[str | list[int]]:
        """Return the prompts, each a text or token ids. Raises InvalidRequestError or ContextLengthError."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        # This comes first, because looking at each of very many entries takes time.
        if len(given) > max(MAX_SEQUENCES, max_model_len) and self.truncate_prompt_tokens is None:
            message = (
                f"This model's maximum context length is {max_model_len} tokens, and a request may have "
                f"{MAX_SEQUENCES} prompts. However, prompt has {len(given)} entries. Shorten it, or set "
                "truncate_prompt_tokens."
            )
            raise ContextLengthError(message, param="prompt")
        if len(set(map(type, given))) > 1:
            raise InvalidRequestError("prompt must not mix texts and token ids", param="prompt")
        if not given or isinstance(given[0], int):
            return [cast(list[int], given)]
        check_count("prompt", len(given), MAX_SEQUENCES)
        check_choices(len(given), max(self.n or 1, self.best_of or 1))
        return cast(list[str | list[int]], given)

    def prompts_request(self, max_model_len: int) -> PromptsRequest:
        """Make the core's request. With echo it needs the prompt's log-probabilities. Raises as `prompts` does."""
        limit = self.num_new_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        given = {"logprobs": self.num_logprobs, "best_of": self.best_of, "max_tokens": limit}
        shown: dict[str, int] = {}
        if self.echo and self.num_logprobs is not None:
            given["prompt_logprobs"] = max(self.num_logprobs, self.prompt_logprobs or 0)
            shown["logprobs"] = self.num_logprobs
        if self.prompt_logprobs is not None:
            shown["prompt_logprobs"] = self.prompt_logprobs
        return PromptsRequest(
            **self.text_fields(),
            sampling=self.sampling(**given),
            default_max_tokens=DEFAULT_COMPLETION_TOKENS,
            names=self.names(),
            prompts=self.prompts(max_model_len),
            suffix=self.suffix,
            num_prompt_logprobs=shown,
        )
