"""The experts of a layer. A rank keeps its share of each of them: a range of intermediate_size.

T: tokens; E: experts; H: size of the experts' inputs and outputs, which is hidden_size if there are no latents.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor, nn

from pagewick.kernels.options import Identities, MoeBiases, SharedOutput
from pagewick.layers.config import MoeConfig
from pagewick.layers.context import LayerBatch, LayerContext
from pagewick.layers.expert_offload import OffloadedExperts
from pagewick.parallel.sharding import shard_bounds
from pagewick.quantization.expert_storage import ExpertStorage
from pagewick.quantization.experts import make_experts
from pagewick.quantization.share import Part, Share, check_floats, whole_rows
from pagewick.quantization.weight import Pieces

_BIAS: Final = "bias"


class ExpertWeights(nn.Module):
    """x [T, H] and router logits [T, E] float32 -> [T, H], this rank's partial sum.

    prefix: the checkpoint name of the module that holds the experts, whose tensors are `prefix`.0.up_proj.weight and so
    on. width: H. Raises ConfigError if some should be in host memory and cannot.
    """

    def __init__(self, context: LayerContext, prefix: str, width: int, config: MoeConfig) -> None:
        super().__init__()
        size = config.intermediate_size
        kept = shard_bounds(size, context.tp_rank, context.tp_size)
        first = tuple(Part(name, size, (kept,)) for name in config.input_projections)
        self._shares = Share(first, width, (0, width)), whole_rows(width, size, kept)
        self._num_experts = config.num_experts
        # Checkpoint name of a tensor's owner -> the expert, which of its two weights, and the part of that weight.
        self._places: dict[str, tuple[int, int, str | None]] = {}
        for expert in range(config.num_experts):
            owner = f"{prefix.rpartition('.')[2]}.{expert}"
            for name in config.input_projections:
                self._places[f"{owner}.{name}"] = expert, 0, name
            self._places[f"{owner}.down_proj"] = expert, 1, None
        num_offloaded = config.num_offloaded(context.num_experts_offload_per_rank, context.tp_size)
        gate_up_experts, down_experts = (
            make_experts(
                config.num_experts - num_offloaded,
                share,
                [
                    tuple(context.choose_method(f"{prefix}.{expert}.{name}") for name in names)
                    for expert in range(config.num_experts)
                ],
                context.dtype,
                context.device,
            )
            for share, names in zip(self._shares, (config.input_projections, ("down_proj",)), strict=True)
        )
        self.gate_up_bias: nn.Parameter | None = None
        self.down_bias: nn.Parameter | None = None
        if config.has_expert_biases:
            self.gate_up_bias, self.down_bias = (
                nn.Parameter(
                    torch.zeros(config.num_experts, share.num_rows, dtype=context.dtype, device=context.device),
                    requires_grad=False,
                )
                for share in self._shares
            )
        # The ranks' partial sums are added, and the second bias must count once.
        self._adds_down_bias = context.tp_rank == 0
        self._num_identities = config.num_identities
        store = OffloadedExperts if num_offloaded else ResidentExperts
        self.store = store(config, gate_up_experts, down_experts)

    @property
    def num_parameters(self) -> int:
        """Number of weights in this rank's share of all experts, on the device and in host memory."""
        weights = self._num_experts * sum(share.num_rows * share.num_columns for share in self._shares)
        return weights + sum(bias.numel() for bias in (self.gate_up_bias, self.down_bias) if bias is not None)

    def forward(
        self,
        x: Tensor,
        logits: Tensor,
        biases: MoeBiases,
        shared: SharedOutput | None,
        batch: LayerBatch | None = None,
    ) -> Tensor:
        """biases, those of the experts left out, and shared are those of kernels.fused_moe; batch: as in Linear."""
        down = self.down_bias if self._adds_down_bias else None
        biases = biases._replace(gate_up=self.gate_up_bias, down=down)
        if not self._num_identities:
            return self.store(x, logits, biases, shared)  # type: ignore[no-any-return]
        # They count once, too.
        identities = Identities(self._num_identities, x if self._adds_down_bias else None)
        return self.store(x, logits, biases, shared, identities)  # type: ignore[no-any-return]

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        storages = self.store.gate_up, self.store.down
        for owner, (expert, index, part) in self._places.items():
            yield from ((owner, name) for name in storages[index].expected(expert, part))
            if self.gate_up_bias is not None:
                yield owner, _BIAS

    def product_of(self, part: str | None) -> tuple[int, int]:
        """Return the expert of a tensor's owner, and which of its two products the tensor belongs to, 0 or 1."""
        assert part is not None, "every tensor is an expert's"
        return self._places[part][:2]

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        """Keep this rank's share of one expert's tensor. Raises ModelLoadError if it does not fit."""
        assert part is not None, "every tensor is an expert's"
        expert, index, part_of_weight = self._places[part]
        if name == _BIAS and self.gate_up_bias is not None:
            self._load_bias(expert, index, part_of_weight, tensor)
            return
        memories, place = self.store.place_of(expert)
        memories[index].load(place, part_of_weight, name, tensor)

    def _load_bias(self, expert: int, index: int, part: str | None, tensor: Tensor) -> None:
        bias, share = (self.gate_up_bias, self.down_bias)[index], self._shares[index]
        assert bias is not None, "both are there"
        kept, offset = share.part(part)
        check_floats(tensor, (kept.num_rows,))
        for start, stop in kept.ranges:
            bias[expert, offset : offset + stop - start].copy_(tensor[start:stop])
            offset += stop - start

    def load_in_pieces(self, name: str, tensor: Tensor, part: str | None, pieces: Pieces) -> None:
        """load_weight, which uploads an expert that will be on the device: it is as small as a piece."""
        assert part is not None, "every tensor is an expert's"
        is_on_device = self._places[part][0] < self.store.gate_up.num_experts
        self.load_weight(name, pieces.take(tensor) if is_on_device else tensor, part)
        pieces.release(tensor)

    def finish_loading(self) -> None:
        self.store.finish()


class ResidentExperts(nn.Module):
    """All experts on the device.

    gate_up: the weights of the first product, in which there are no gates if the experts have none. down: those of the
    second product.
    """

    def __init__(self, config: MoeConfig, gate_up: ExpertStorage, down: ExpertStorage) -> None:
        super().__init__()
        self._config = config
        self.gate_up, self.down = gate_up, down

    def place_of(self, expert: int) -> tuple[tuple[ExpertStorage, ExpertStorage], int]:
        """Return the storages of gate_up and of down, and the expert's number in them."""
        return (self.gate_up, self.down), expert

    def finish(self) -> None:
        self.gate_up.finish()
        self.down.finish()

    def forward(
        self,
        x: Tensor,
        logits: Tensor,
        biases: MoeBiases,
        shared: SharedOutput | None,
        identities: Identities | None = None,
    ) -> Tensor:
        """Compute kernels.fused_moe."""
        routing, kind = self._config.routing, self._config.activation
        return self.gate_up.fused_moe(
            self.down, x, logits, routing, activation=kind, biases=biases, shared=shared, identities=identities
        )
