"""What normalises each head of queries or keys before it is rotated and stored."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorm:
    """normed * (weight + offset) + bias of each head of D numbers, in float32.

    weight, bias: [D], or [heads, D] where each head has its own. normed is the head divided by its root mean square, as
    in Qwen 3, or, for is_layer_norm, brought to mean 0 and variance 1, as in Phi and StableLM. offset: Gemma's 1.
    """

    weight: Tensor
    bias: Tensor | None = None
    eps: float = 1e-6
    offset: float = 0.0
    is_layer_norm: bool = False
