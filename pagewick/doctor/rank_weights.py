"""The weights in one rank's memory, by the part of the model that reads them. Imports no torch.

A decode step reads attention, dense and shared MLPs and the vocabulary head whole, the routed experts in part, and only
a few rows of the embedding.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Final

from pagewick.doctor.checkpoint import Checkpoint
from pagewick.models.config import ModelConfig
from pagewick.models.stages import Stage, stages_of
from pagewick.models.tensor_sizes import Role
from pagewick.models.tensors import model_tensors

_PARTS: Final[tuple[Role, ...]] = ("embedding", "head", "expert", "shared_expert")


@dataclass(frozen=True, slots=True)
class RankWeights:
    """Bytes of one rank.

    dense: attention, MLPs without experts, norms and routers. is_tied: whether the head is the embedding.
    """

    dense: int = 0
    shared_expert: int = 0
    expert: int = 0
    embedding: int = 0
    head: int = 0
    is_tied: bool = False

    @property
    def total(self) -> int:
        return self.dense + self.shared_expert + self.expert + self.embedding + self.head

    @property
    def read_head(self) -> int:
        """Bytes that a step reads for its logits."""
        return self.embedding if self.is_tied else self.head


def weights_of_rank(
    model: ModelConfig, checkpoint: Checkpoint, num_ranks: int, dtype: str | None = None, num_stages: int = 1
) -> RankWeights:
    """The weights of the first of `num_ranks` ranks, of the stage that has most; no other rank has more.

    Weights in blocks stay as they are, or are expanded. dtype: that of the others; None for the model's own. Raises
    ConfigError if the layers cannot be divided into stages.
    """
    stages = stages_of(model, num_stages)
    found = (_weights_of_stage(model, checkpoint, num_ranks, dtype, stage) for stage in stages)
    return max(found, key=lambda weights: weights.total)


def _weights_of_stage(
    model: ModelConfig, checkpoint: Checkpoint, num_ranks: int, dtype: str | None, stage: Stage
) -> RankWeights:
    table = list(model_tensors(model, [tensor.name for tensor in checkpoint.tensors], num_ranks=num_ranks))
    stored = {tensor.name: tensor.kept_bytes for tensor in checkpoint.kept_tensors if tensor.is_in_blocks}
    sums: defaultdict[str, float] = defaultdict(float)
    for tensor in table:
        if not stage.holds(tensor.path):
            continue
        if tensor.name not in stored or tensor.role == "router":
            num_bytes: float = tensor.kept_bytes(dtype or model.dtype)
        else:
            num_bytes = stored[tensor.name] * tensor.num_kept / tensor.num_elements
        sums[tensor.role if tensor.role in _PARTS else "dense"] += num_bytes
    return RankWeights(**{part: round(size) for part, size in sums.items()}, is_tied=model.tie_word_embeddings)
