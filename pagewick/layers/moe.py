"""A mixture of experts: a router, the experts from which it chooses, and one shared expert that serves every token.

Module names are checkpoint names. T: tokens; E: experts; H: hidden_size; L: size of latents.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pagewick import kernels
from pagewick.errors import ModelLoadError
from pagewick.kernels.options import MoeBiases, SharedOutput
from pagewick.layers.config import MoeConfig
from pagewick.layers.context import LayerBatch, LayerContext
from pagewick.layers.elementwise import Activation
from pagewick.layers.experts import ExpertWeights
from pagewick.layers.linear import Linear, MergedColumnParallelLinear, ReplicatedLinear, WeightLayer
from pagewick.layers.norm import RMSNorm
from pagewick.parallel.sharding import shard_bounds
from pagewick.quantization.share import check_floats, check_shape, whole_rows


class MoeLayer(nn.Module):
    """[T, H] -> [T, H]. Each rank computes with its share of all experts; the partial sums are added once at the end.

    prefix: the layer's checkpoint name; gate, experts, shared_expert, shared_expert_gate, fc1_latent_proj and
    fc2_latent_proj are below it.
    """

    def __init__(self, context: LayerContext, prefix: str, hidden_size: int, config: MoeConfig) -> None:
        super().__init__()
        self._collectives = context.collectives
        self.gate = Router(
            context,
            f"{prefix}.gate",
            hidden_size,
            config.num_experts + config.num_identities,
            has_bias=config.has_router_bias,
            is_bias_matrix=config.is_router_bias_matrix,
        )
        if config.has_logit_bias:
            self.gate.add_logit_bias(context)
        self.router_norm: RMSNorm | None = None
        if config.router_norm_eps is not None:
            self.router_norm = RMSNorm(context, hidden_size, config.router_norm_eps)
        self._top_k = config.routing.top_k
        self._has_root_scores = config.has_root_scores
        self.expert_table: ExpertTable | None = None
        if config.has_expert_table:
            self.expert_table = ExpertTable(context, config.vocab_size, config.routing.top_k, config.num_experts)
        self.expert_scales = ExpertScales(context, config.num_experts) if config.has_expert_scales else None
        self._logit_scale = config.logit_scale
        # Whole on every rank: the ranks divide the experts' intermediate_size, and not their inputs and outputs.
        self.fc1_latent_proj: ReplicatedLinear | None = None
        self.fc2_latent_proj: ReplicatedLinear | None = None
        width = hidden_size if config.latent_size is None else config.latent_size
        if config.latent_size is not None:
            self.fc1_latent_proj = ReplicatedLinear(context, f"{prefix}.fc1_latent_proj", hidden_size, width)
            self.fc2_latent_proj = ReplicatedLinear(context, f"{prefix}.fc2_latent_proj", width, hidden_size)
        self.experts = ExpertWeights(context, f"{prefix}.experts", width, config)
        self.shared_expert: SharedExpert | None = None
        self.shared_expert_gate: Router | None = None
        if config.shared_intermediate_size is not None:
            self.shared_expert = SharedExpert(
                context, f"{prefix}.shared_expert", hidden_size, config.shared_intermediate_size, config
            )
        if config.has_shared_gate:
            self.shared_expert_gate = Router(context, f"{prefix}.shared_expert_gate", hidden_size, 1)

    def forward(
        self,
        hidden_states: Tensor,
        batch: LayerBatch | None = None,
        router_input: Tensor | None = None,
        token_ids: Tensor | None = None,
    ) -> Tensor:
        """router_input: [T, H], what the router reads in place of the hidden states. token_ids: [T], for a table."""
        gate, shared = None, None
        if self.shared_expert_gate is not None:
            gate = self.shared_expert_gate(hidden_states, batch).squeeze(-1)
        if self.shared_expert is not None:
            shared = SharedOutput(self.shared_expert(hidden_states, batch), gate)
        routed = hidden_states if router_input is None else router_input
        logits = self.gate(routed if self.router_norm is None else self.router_norm(routed), batch)
        if self._logit_scale != 1.0:
            logits = kernels.scale(logits, self._logit_scale)
        scales = None if self.expert_scales is None else self.expert_scales.weight
        bias = self.gate.e_score_correction_bias
        if self._has_root_scores:
            choice = bias if self.expert_table is None else self.expert_table.of_tokens(token_ids)
            assert choice is not None, "there is a bias or a table"
            logits, bias = kernels.root_logits(logits, choice, self._top_k), None
        biases = MoeBiases(bias, scales=scales)
        if self.fc1_latent_proj is None or self.fc2_latent_proj is None:
            partial: Tensor = self.experts(hidden_states, logits, biases, shared, batch)
            return self._collectives.all_reduce(partial)
        latents = self.experts(self.fc1_latent_proj(hidden_states, batch), logits, biases, None, batch)
        # The projection is linear, so that the ranks' sums are added behind it, once, with those of the shared expert.
        partial = self.fc2_latent_proj(latents, batch)
        return self._collectives.all_reduce(partial if shared is None else kernels.add(partial, shared.output))


class Router(WeightLayer):
    """Scores of the experts for each token: [T, H] -> [T, num_experts] in float32, the same on every rank.

    The sums are float32 and not rounded, because ranks and batches must not choose different experts. has_bias: there
    is a bias [num_experts] float32, which is not added here: it changes only which experts are chosen. The file may
    have it as a matrix [1, num_experts]. With one row, the router is the gate of a shared expert, which scores that one
    alone.
    """

    def __init__(
        self,
        context: LayerContext,
        prefix: str,
        hidden_size: int,
        num_experts: int,
        *,
        has_bias: bool = False,
        is_bias_matrix: bool = False,
    ) -> None:
        super().__init__(context.make_weight(prefix, whole_rows(num_experts, hidden_size), has_float32_sums=True))
        self.e_score_correction_bias = self.make_vector(torch.float32, context.device) if has_bias else None
        self.bias: nn.Parameter | None = None
        self._is_bias_matrix = is_bias_matrix

    def add_logit_bias(self, context: LayerContext) -> None:
        """Have a bias of the scores, which is part of them (gpt-oss)."""
        self.bias = self.make_vector(context.dtype, context.device)

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        if name == "e_score_correction_bias" and self._is_bias_matrix:
            check_floats(tensor, (1, self.share.num_rows))
            tensor = tensor[0]
        super().load_weight(name, tensor, part)

    def forward(self, x: Tensor, batch: LayerBatch | None = None) -> Tensor:
        return self.weight.linear(x, self.bias, out_dtype=torch.float32)


class ExpertTable(nn.Module):
    """The experts of each token by its id: [vocab_size, top_k] int64."""

    def __init__(self, context: LayerContext, vocab_size: int, top_k: int, num_experts: int) -> None:
        super().__init__()
        empty = torch.zeros(vocab_size, top_k, dtype=torch.int64, device=context.device)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self._num_experts = num_experts

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        return ((None, "weight"),)

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        check_shape(tensor, tuple(self.weight.shape))
        if tensor.dtype not in (torch.int32, torch.int64):
            raise ModelLoadError(f"it holds {tensor.dtype}, and must hold int32 or int64, the ids of experts")
        self.weight.copy_(tensor)

    def finish_loading(self) -> None:
        if bool(((self.weight < 0) | (self.weight >= self._num_experts)).any()):
            raise ModelLoadError(f"tid2eid names experts outside of 0 .. {self._num_experts - 1}")

    def of_tokens(self, token_ids: Tensor | None) -> Tensor:
        """Return the experts of tokens [T]: [T, top_k] int64."""
        assert token_ids is not None, "the block gives the ids of tokens"
        # Operations copy rows of floats, whose bits these are.
        words = self.weight.view(torch.float32)
        return kernels.gather_rows(words, token_ids, words.shape[0], words.shape[1], False).view(torch.int64)


class ExpertScales(nn.Module):
    """A factor of each expert's weight: [num_experts] float32, rounded to the dtype of the activations."""

    def __init__(self, context: LayerContext, num_experts: int) -> None:
        super().__init__()
        empty = torch.empty(num_experts, dtype=torch.float32, device=context.device)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self._dtype = context.dtype

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        return ((None, "weight"),)

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        check_floats(tensor, tuple(self.weight.shape))
        self.weight.copy_(tensor.to(self._dtype))


class SharedExpert(nn.Module):
    """A feed-forward layer, gated if the other experts are: [T, H] -> [T, H], this rank's partial sum."""

    def __init__(
        self, context: LayerContext, prefix: str, hidden_size: int, intermediate_size: int, config: MoeConfig
    ) -> None:
        super().__init__()
        self.act_fn = Activation(config.shared_activation or config.activation, is_gated=config.is_gated)
        self.gate_up_proj = MergedColumnParallelLinear(
            context, prefix, hidden_size, dict.fromkeys(config.input_projections, intermediate_size),
            fused_name="gate_up_proj" if config.is_shared_fused else None,
        )  # fmt: skip
        columns = shard_bounds(intermediate_size, context.tp_rank, context.tp_size)
        # Not RowParallelLinear: MoeLayer adds the partial sums of all experts over the ranks at once.
        self.down_proj = Linear(context, f"{prefix}.down_proj", whole_rows(hidden_size, intermediate_size, columns))
        self._scale = config.shared_scale

    def forward(self, hidden_states: Tensor, batch: LayerBatch | None = None) -> Tensor:
        output: Tensor = self.down_proj(self.act_fn(self.gate_up_proj(hidden_states, batch)), batch)
        return output if self._scale == 1.0 else kernels.scale(output, self._scale)
