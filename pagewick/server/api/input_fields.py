"""The fields of requests whose texts are turned into numbers: embeddings and classes."""

from __future__ import annotations

from typing import cast

from msgspec import Struct

from pagewick.errors import InvalidRequestError
from pagewick.pooling_params import Classification, PoolingParams
from pagewick.server.core.limits import MAX_INPUTS, check_count
from pagewick.server.core.request import PromptsRequest, Serving

# From names of the core to those of these routes.
_NAMES = {"prompt": "input", "prompt[]": "input[]", "messages": "input"}


class InputFields(Struct, kw_only=True):
    """The texts, and how they become prompts.

    model: a name of the model; the default is the model that is served.
    input: a text, a list of token ids, or a list of either.
    truncate_prompt_tokens: cut the end of a text if its prompt has more tokens; -1: if it does not fit.
    priority, cache_salt, timeout, add_special_tokens: as for completions.
    """

    input: str | list[str | int | list[int]]
    model: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None

    def prompts_request(self, pooling: PoolingParams | Classification | None) -> PromptsRequest:
        """Make the core's request. Raises InvalidRequestError."""
        return PromptsRequest(
            serving=Serving(self.priority, self.cache_salt, timeout_s=self.timeout),
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            add_special_tokens=self.add_special_tokens,
            sampling={"max_tokens": 0, "temperature": 0.0, "seed": 0},
            names=_NAMES,
            prompts=self._inputs(),
            pooling=pooling,
        )

    def _inputs(self) -> list[str | list[int]]:
        given = [self.input] if isinstance(self.input, str) else self.input
        if len(set(map(type, given))) > 1:
            raise InvalidRequestError("input must not mix texts and token ids", param="input")
        inputs = cast(list[str | list[int]], [given] if given and isinstance(given[0], int) else given)
        check_count("input", len(inputs), MAX_INPUTS)
        for place, one in enumerate(inputs):
            if not one:
                message = f"input[{place}] is empty; give a text, or at least one token"
                raise InvalidRequestError(message, param="input")
        return inputs
