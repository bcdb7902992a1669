"""SamplingParams of a request, from the model's defaults and the fields that the request sets."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from pagewick.errors import InvalidRequestError
from pagewick.sampling_params import MAX_LOGIT_BIASES, SamplingParams, with_changes
from pagewick.server.core.limits import check_stop
from pagewick.server.core.request import TextRequest

LOWEST_BIAS = -100.0

# A token id or a text, and its bias; False bans.
BiasPair = tuple[int | str, float | bool]


def bias_texts(sampling: Mapping[str, Any]) -> list[str]:
    """Return the texts that logit_bias has instead of tokens. Raises InvalidRequestError for too many pairs."""
    pairs = sampling.get("logit_bias")
    if not isinstance(pairs, list):
        return []
    if len(pairs) > MAX_LOGIT_BIASES:
        message = f"logit_bias must have at most {MAX_LOGIT_BIASES} entries; got {len(pairs)}"
        raise InvalidRequestError(message, param="logit_bias")
    return [key for key, _ in pairs if isinstance(key, str)]


def sampling_params(
    request: TextRequest,
    defaults: SamplingParams,
    spelled: Mapping[str, Sequence[int]],
    kept: Collection[str] = frozenset(),
) -> SamplingParams:
    """Return the defaults, changed as the request says.

    spelled: the tokens of each of `bias_texts`. kept: the defaults that the operator chose.
    Raises InvalidRequestError for a value out of range.
    """
    changes = dict(request.sampling)
    if defaults.max_tokens is None and request.default_max_tokens is not None:
        changes.setdefault("max_tokens", request.default_max_tokens)
    check_stop(changes.get("stop") or ())
    if isinstance(pairs := changes.get("logit_bias"), list):
        changes["logit_bias"] = _biases(pairs, spelled)
    return with_changes(defaults, changes, kept)


def _biases(pairs: Iterable[BiasPair], spelled: Mapping[str, Sequence[int]]) -> dict[int, float]:
    """Add up the biases of a token that several pairs name, as llama.cpp does."""
    biases: dict[int, float] = {}
    banned: set[int] = set()
    for key, bias in pairs:
        if bias is True:
            raise InvalidRequestError("a bias must be a number, or false to ban the token", param="logit_bias")
        for token_id in spelled[key] if isinstance(key, str) else [key]:
            biases[token_id] = biases.get(token_id, 0.0) + bias
            if bias is False:
                banned.add(token_id)
    return biases | dict.fromkeys(banned, LOWEST_BIAS)
