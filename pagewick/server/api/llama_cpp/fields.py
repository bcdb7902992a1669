"""Requests of llama.cpp's API.

Source: https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from msgspec import Struct

from pagewick.errors import InvalidRequestError
from pagewick.server.api.known_fields import OPENAI_FIELDS, UNSUPPORTED
from pagewick.server.api.request_fields import one_of
from pagewick.server.api.structured_fields import StructuredFields
from pagewick.server.core.limits import MAX_SEQUENCES, check_choices, check_count
from pagewick.server.core.request import PromptsRequest
from pagewick.text.infill import Infill, OtherFile

# Its clients send these with every request, though they change little or nothing. A header names them as ignored.
_IGNORED = frozenset({"n_cache_reuse", "n_indent", "n_keep", "return_progress", "samplers", "t_max_predict_ms"})
LLAMA_FIELDS = replace(
    OPENAI_FIELDS, unsupported={name: nothing for name, nothing in UNSUPPORTED.items() if name not in _IGNORED}
)
MAX_RESPONSE_FIELDS = 100
MAX_FILES = 256
# Fields of OpenAI's routes that these do not have.
_NOT_HERE = ("early_stopping", "length_penalty", "prompt_logprobs", "use_beam_search")


class LlamaRequest(StructuredFields, kw_only=True):
    """Fields that both routes have.

    model: a name of the model. stream: send the response as it is generated.
    n_predict: upper limit of new tokens; -1, the default, until the context is full. 0: only compute the prompt.
    n_probs: alternatives of each token to report. n_cmpl: number of responses for each prompt.
    return_tokens: also return the token ids. timings_per_token: return timings in each event of a stream.
    response_fields: the fields that a response is to have; one with slashes is taken out of its object.
    """

    model: str | None = None
    stream: bool | None = None
    n_predict: int | None = None
    n_probs: int | None = None
    n_cmpl: int | None = None
    return_tokens: bool | None = None
    timings_per_token: bool | None = None
    response_fields: list[str] | None = None

    def __post_init__(self) -> None:
        for name in _NOT_HERE:
            if getattr(self, name) is not None:
                raise InvalidRequestError(
                    f"{name} is not a field of this route: send it to /v1/completions", param=name
                )
        if self.response_fields:
            check_count("response_fields", len(self.response_fields), MAX_RESPONSE_FIELDS)
        one_of(max_tokens=self.max_tokens, n_predict=self.n_predict)
        one_of(n=self.n, n_cmpl=self.n_cmpl)

    @property
    def num_choices(self) -> int:
        return one_of(n=self.n, n_cmpl=self.n_cmpl) or 1

    def names(self) -> dict[str, str]:
        """Return TextRequest.names."""
        names = super().names()
        for name, own in (("max_tokens", "n_predict"), ("logprobs", "n_probs"), ("n", "n_cmpl")):
            if getattr(self, own) is not None:
                names[name] = own
        return names

    def prompts_request(self) -> PromptsRequest:
        """Make the core's request. Raises InvalidRequestError."""
        limit = one_of(max_tokens=self.max_tokens, n_predict=self.n_predict)
        sampling = self.sampling(n=self.num_choices, logprobs=self.n_probs or None)
        sampling.pop("max_tokens", None)
        if self.seed == -1:
            del sampling["seed"]
        # A limit of the server's does not hold for a request that asks for none.
        given = {} if limit is None else {"max_tokens": None if limit == -1 else limit}
        prompts = self.prompts()
        check_choices(len(prompts), self.num_choices)
        return PromptsRequest(
            is_stream=bool(self.stream),
            sampling={**sampling, **given},
            # Here, too, a response ends where the context is full.
            lowers_max_tokens=True,
            names=self.names(),
            serving=self.serving(),
            prompts=prompts,
        )

    def prompts(self) -> list[str | list[int] | Infill]:
        raise NotImplementedError


class LlamaCompletionRequest(LlamaRequest, kw_only=True):
    """prompt: a text, a list of token ids, or a list of either, which gets a list of responses."""

    prompt: str | list[str | int | list[int]]

    @property
    def has_several(self) -> bool:
        given = self.prompt
        is_one = isinstance(given, str) or all(isinstance(one, int) for one in given)
        return self.num_choices > 1 or not is_one

    def prompts(self) -> list[str | list[int] | Infill]:
        given = self.prompt
        if isinstance(given, str):
            return [given]
        kinds = set(map(type, given))
        if int in kinds and len(kinds) > 1:
            message = "prompt must not mix token ids with texts or lists; send /tokenize the texts first"
            raise InvalidRequestError(message, param="prompt")
        if kinds <= {int}:
            return [cast(list[int], given)]
        check_count("prompt", len(given), MAX_SEQUENCES)
        return cast(list[str | list[int] | Infill], given)


class ExtraFile(Struct, kw_only=True):
    """filename: its name in the project. text: its content, or a part of that."""

    filename: str = ""
    text: str


class LlamaInfillRequest(LlamaRequest, kw_only=True):
    """input_prefix, input_suffix: the text before and after the wanted one. input_extra: other files of the project.

    prompt: how the wanted text begins.
    """

    input_prefix: str
    input_suffix: str
    input_extra: list[ExtraFile] | None = None
    prompt: str | None = None

    @property
    def has_several(self) -> bool:
        return self.num_choices > 1

    def names(self) -> dict[str, str]:
        return {"suffix": "input_suffix", **super().names()}

    def prompts(self) -> list[str | list[int] | Infill]:
        files = self.input_extra or []
        if files:
            check_count("input_extra", len(files), MAX_FILES)
        others = [OtherFile(one.filename, one.text) for one in files]
        return [Infill(self.input_prefix, self.input_suffix, others, self.prompt or "")]


def selected(whole: dict[str, Any], fields: list[str] | None) -> dict[str, Any]:
    """Return the wanted fields of a response; those that it does not have are left out. None or empty: all fields."""
    if not fields:
        return whole
    found: dict[str, Any] = {}
    for path in fields:
        value: Any = whole
        for name in path.split("/"):
            value = value.get(name, found) if isinstance(value, dict) else found
        if value is not found:
            found[path.rpartition("/")[2]] = value
    return found
