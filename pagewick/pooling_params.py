"""PoolingParams: what an embedding is made of, and how it is returned. No torch.

Scoring and Classification: the same for a score, and for the classes of a text.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Final

from pagewick.errors import InvalidRequestError, UnsupportedError
from pagewick.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

POOLINGS: Final = ("cls", "last", "mean")
# A request that wants an embedding or a score samples nothing.
EMBEDDING: Final = SamplingParams(max_tokens=0, temperature=0, seed=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How the hidden states of a prompt become its embedding.

    pooling: "cls" takes that of the first token, "last" that of the last one, "mean" the mean of all; None: what the
    model was trained for, as far as its file says so, else "last". dimensions: keep this many of the first numbers,
    which models trained for it (Matryoshka) allow; None: all. normalize: divide the vector by its length.
    use_activation: vLLM's name of normalize; of classes, False returns logits in place of probabilities.
    """

    pooling: str | None = None
    dimensions: int | None = None
    normalize: bool = True
    use_activation: bool | None = None

    def checked(self, hidden_size: int, usual: str) -> PoolingParams:
        """Return the parameters with a pooling. Raises InvalidRequestError for values out of range.

        hidden_size: the model's. usual: the pooling for which it was trained; may be empty.
        """
        if self.pooling not in (None, *POOLINGS):
            raise InvalidRequestError(f"pooling must be cls, last or mean; got {self.pooling!r}", param="pooling")
        if not isinstance(self.normalize, bool):
            raise InvalidRequestError(f"normalize must be true or false; got {self.normalize!r}", param="normalize")
        self._check_use_activation()
        wanted = self.dimensions
        is_number = isinstance(wanted, int) and not isinstance(wanted, bool)
        if wanted is not None and not (is_number and 1 <= wanted <= hidden_size):
            message = f"dimensions must be 1 to {hidden_size}, the size of this model's embeddings; got {wanted!r}"
            raise InvalidRequestError(message, param="dimensions")
        normalize = self.normalize and self.use_activation is not False
        return replace(self, pooling=self.pooling or usual or "last", normalize=normalize)

    def for_classes(self) -> bool | None:
        """Return use_activation. Raises InvalidRequestError for parameters of embeddings, which change no class."""
        self._check_use_activation()
        for name in ("pooling", "dimensions", "normalize"):
            if getattr(self, name) != getattr(PoolingParams(), name):
                message = f"{name} is for embeddings, and classes have none; leave it out"
                raise InvalidRequestError(message, param=name)
        return self.use_activation

    def _check_use_activation(self) -> None:
        given = self.use_activation
        if given is not None and not isinstance(given, bool):
            raise InvalidRequestError(f"use_activation must be true or false; got {given!r}", param="use_activation")

    def vector(self, pooled: bytes) -> NDArray[np.float32]:
        """Return the embedding. pooled: the engine's float32 numbers, little-endian."""
        # Not at the top: a server that makes no embeddings starts without it.
        import numpy as np

        numbers = np.frombuffer(pooled, "<f4")[: self.dimensions].astype(np.float64)
        length = float(np.linalg.norm(numbers)) if self.normalize else 1.0
        # A vector of zeros has no direction.
        return (numbers / (length or 1.0)).astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """How the logits after a prompt become its score.

    label_ids: the tokens whose logits count, the wanted answer first; empty: those of the model's head of labels.
    activation: softmax: the probability of the first; sigmoid: that of the only one; none: its logit.
    separator_id: the token that ends the query, where those behind it have another type; -1: no token does.
    """

    pooling: ClassVar[str] = "score"

    label_ids: tuple[int, ...] = ()
    activation: str = "softmax"
    separator_id: int = -1

    def score(self, pooled: bytes) -> float:
        """Return the score. pooled: the engine's float32 logits, little-endian."""
        return _activated(_numbers(pooled), self.activation)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Classification:
    """How the logits of a model's labels sort a text.

    activation: softmax: probabilities that add up to 1; sigmoid: one of each label by itself; none: the logits.
    names: of the labels.
    """

    pooling: ClassVar[str] = "score"

    activation: str
    names: tuple[str, ...]

    @classmethod
    def of(
        cls, num_labels: int, problem_type: str, names: Sequence[str], *, use_activation: bool | None = None
    ) -> Classification:
        """Return what transformers and vLLM do with the labels of a model; see LabelHead.

        use_activation: False: return logits. Raises UnsupportedError for a model without labels.
        """
        if not num_labels:
            raise UnsupportedError(
                "this model has no labels by which texts could be classified; serve one whose architecture ends in "
                "ForSequenceClassification"
            )
        usual = "softmax" if num_labels > 1 else "sigmoid"
        activation = {"multi_label_classification": "sigmoid", "regression": "none"}.get(problem_type, usual)
        return cls(
            activation="none" if use_activation is False else activation,
            names=tuple(names) or tuple(f"LABEL_{index}" for index in range(num_labels)),
        )

    def probabilities(self, pooled: bytes) -> list[float]:
        """Return one number for each label. pooled: the engine's float32 logits, little-endian."""
        return _activated(_numbers(pooled), self.activation)

    def label(self, pooled: bytes) -> str:
        """Return the name of the label with the largest logit; probabilities may be equal where logits are not."""
        logits = _numbers(pooled)
        return self.names[logits.index(max(logits))]


def _numbers(pooled: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(pooled) // 4}f", pooled)


def _activated(logits: Sequence[float], activation: str) -> list[float]:
    if activation == "none":
        return list(logits)
    if activation == "sigmoid":
        return [_softmax((logit, 0.0))[0] for logit in logits]
    return _softmax(logits)


def _softmax(logits: Sequence[float]) -> list[float]:
    # No power is of a number above 0, so that none overflows.
    highest = max(logits)
    powers = [math.exp(logit - highest) for logit in logits]
    total = math.fsum(powers)
    return [power / total for power in powers]
