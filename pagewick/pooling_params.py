"""PoolingParams: what an embedding is made of, and how it is returned. Scoring: the same for a score. No torch."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Final

from pagewick.errors import InvalidRequestError
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
    """

    pooling: str | None = None
    dimensions: int | None = None
    normalize: bool = True

    def checked(self, hidden_size: int, usual: str) -> PoolingParams:
        """Return the parameters with a pooling. Raises InvalidRequestError for values out of range.

        hidden_size: the model's. usual: the pooling for which it was trained; may be empty.
        """
        if self.pooling not in (None, *POOLINGS):
            raise InvalidRequestError(f"pooling must be cls, last or mean; got {self.pooling!r}", param="pooling")
        if not isinstance(self.normalize, bool):
            raise InvalidRequestError(f"normalize must be true or false; got {self.normalize!r}", param="normalize")
        wanted = self.dimensions
        is_number = isinstance(wanted, int) and not isinstance(wanted, bool)
        if wanted is not None and not (is_number and 1 <= wanted <= hidden_size):
            message = f"dimensions must be 1 to {hidden_size}, the size of this model's embeddings; got {wanted!r}"
            raise InvalidRequestError(message, param="dimensions")
        return replace(self, pooling=self.pooling or usual or "last")

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
    separator_id: the token that ends the query, for models with types of tokens; -1: no token does.
    """

    pooling: ClassVar[str] = "score"

    label_ids: tuple[int, ...] = ()
    activation: str = "softmax"
    separator_id: int = -1

    def score(self, pooled: bytes) -> float:
        """Return the score. pooled: the engine's float32 logits, little-endian."""
        logits = struct.unpack(f"<{len(pooled) // 4}f", pooled)
        if self.activation == "none":
            return float(logits[0])
        others = (0.0,) if self.activation == "sigmoid" else logits[1:]
        # No power is of a number above 0, so that none overflows.
        highest = max(logits[0], *others, -math.inf)
        powers = [math.exp(logit - highest) for logit in (logits[0], *others)]
        return powers[0] / math.fsum(powers)
