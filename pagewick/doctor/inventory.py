"""The tensors that a checkpoint must hold, from its config.json alone: for a model whose files are not here.

A family is a row of a table: which projections have biases, which norms a layer has, how its MLP is built. Everything
else follows from the sizes. Shapes are [out, in], as checkpoints have them. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pagewick.doctor.experts import ExpertShape, experts_of
from pagewick.doctor.shape import ModelShape, from_config, read_size, text_part
from pagewick.doctor.stored import stored_as
from pagewick.errors import ModelLoadError
from pagewick.weights.tensor_headers import TensorInfo

# An entry of config.json that says whether there is a bias, and what holds if it is missing; no entry: it always holds.
_Switch = tuple[str, bool]
_NO: Final[_Switch] = ("", False)
_YES: Final[_Switch] = ("", True)
_ATTENTION: Final[_Switch] = ("attention_bias", False)
_TWO: Final = ("input_layernorm", "post_attention_layernorm")
_GATED: Final = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Family:
    """What differs between architectures in their tensors.

    norms: of a layer. mlp: names of its projections; the last leads back to the hidden size, a fused first one has
    twice the rows. has_qk_norm: norms of a head's size for queries and keys. is_parallel: whether
    config.json's use_parallel_residual takes the second norm away.
    """

    qkv_bias: _Switch = _NO
    o_bias: _Switch = _NO
    mlp_bias: _Switch = _NO
    norm_bias: bool = False
    head_bias: bool = False
    norms: tuple[str, ...] = _TWO
    mlp: tuple[str, ...] = _GATED
    is_qkv_fused: bool = False
    has_qk_norm: bool = False
    is_parallel: bool = False
    o_name: str = "o_proj"
    final_norm: str = "norm"
    experts: tuple[str, str, tuple[str, ...]] = ("mlp.gate", "mlp.experts", _GATED)
    shared: str = ""


FAMILIES: Final[Mapping[str, Family]] = {
    "LlamaForCausalLM": Family(qkv_bias=_ATTENTION, o_bias=_ATTENTION, mlp_bias=("mlp_bias", False)),
    "GraniteForCausalLM": Family(qkv_bias=_ATTENTION, o_bias=_ATTENTION, mlp_bias=("mlp_bias", False)),
    "MistralForCausalLM": Family(),
    "MixtralForCausalLM": Family(
        experts=("block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2")),
    ),
    "Qwen2ForCausalLM": Family(qkv_bias=_YES),
    "Qwen2MoeForCausalLM": Family(qkv_bias=("qkv_bias", True), shared="mlp.shared_expert"),
    "Qwen3ForCausalLM": Family(qkv_bias=_ATTENTION, o_bias=_ATTENTION, has_qk_norm=True),
    "Qwen3MoeForCausalLM": Family(qkv_bias=_ATTENTION, o_bias=_ATTENTION, has_qk_norm=True),
    "DeepseekV2ForCausalLM": Family(o_bias=_ATTENTION, shared="mlp.shared_experts"),
    "DeepseekV3ForCausalLM": Family(o_bias=_ATTENTION, shared="mlp.shared_experts"),
    "GemmaForCausalLM": Family(qkv_bias=_ATTENTION, o_bias=_ATTENTION),
    "Gemma2ForCausalLM": Family(
        qkv_bias=_ATTENTION, o_bias=_ATTENTION,
        norms=(*_TWO, "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
    "Gemma3ForCausalLM": Family(
        qkv_bias=_ATTENTION, o_bias=_ATTENTION, has_qk_norm=True,
        norms=(*_TWO, "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
    "Glm4ForCausalLM": Family(
        qkv_bias=_ATTENTION, mlp=("gate_up_proj", "down_proj"),
        norms=(*_TWO, "post_self_attn_layernorm", "post_mlp_layernorm"),
    ),
    "GlmForCausalLM": Family(qkv_bias=_ATTENTION, mlp=("gate_up_proj", "down_proj")),
    "Phi3ForCausalLM": Family(is_qkv_fused=True, mlp=("gate_up_proj", "down_proj")),
    "PhiForCausalLM": Family(
        qkv_bias=_YES, o_bias=_YES, mlp_bias=_YES, norm_bias=True, head_bias=True, norms=("input_layernorm",),
        mlp=("fc1", "fc2"), o_name="dense", final_norm="final_layernorm",
    ),
    "StableLmForCausalLM": Family(qkv_bias=("use_qkv_bias", False), norm_bias=True, is_parallel=True),
    "Starcoder2ForCausalLM": Family(
        qkv_bias=("use_bias", True), o_bias=("use_bias", True), mlp_bias=("use_bias", True), norm_bias=True,
        mlp=("c_fc", "c_proj"),
    ),
}  # fmt: skip
_MAX_EXPERTS: Final = 2**18
# What leads to another number of tensors, and no published checkpoint of the family needs.
_REFUSED: Final = ("qk_layernorm",)


def tensors_of(config: Mapping[str, Any]) -> list[TensorInfo]:
    """All tensors of a checkpoint with this config.json, as they are stored: their dtypes and bytes included.

    Raises ModelLoadError for an architecture whose tensors are not known here, and for a quantization that is not.
    """
    text, shape = text_part(config), from_config(config)
    family = FAMILIES.get(shape.architecture)
    if family is None:
        raise ModelLoadError(
            f"{shape.architecture}: how many parameters it has does not follow from config.json alone\n"
            f"  put its *.safetensors there, too; without them: {', '.join(sorted(FAMILIES))}"
        )
    for name in _REFUSED:
        if text.get(name):
            raise ModelLoadError(
                f"{name}: how many parameters that means does not follow from config.json alone\n"
                "  put the model's *.safetensors there, too"
            )
    stored = stored_as(config, shape.dtype)
    experts = experts_of(text, shape.num_layers)
    if experts is not None and experts.num_layers * experts.num_experts > _MAX_EXPERTS:
        raise ModelLoadError(
            f"{experts.num_experts} experts in each of {experts.num_layers} layers cannot be meant\n  check config.json"
        )
    parts = _Parts(text, shape, family, experts)
    return [tensor for part in parts.all() for tensor in stored.tensors(*part)]


@dataclass(frozen=True, slots=True)
class _Parts:
    """Yields (name, shape, whether a quantization would take it)."""

    config: Mapping[str, Any]
    shape: ModelShape
    family: Family
    experts: ExpertShape | None

    def all(self) -> Iterator[tuple[str, tuple[int, ...], bool]]:
        hidden, vocab = self.shape.hidden_size, self.shape.vocab_size
        yield "model.embed_tokens.weight", (vocab, hidden), False
        for layer in range(self.shape.num_layers):
            prefix = f"model.layers.{layer}"
            if self.shape.kv_lora_rank:
                yield from self._latent(f"{prefix}.self_attn")
            else:
                yield from self._attention(f"{prefix}.self_attn")
            if self.experts is not None and self.experts.is_sparse[layer]:
                yield from self._experts(prefix, self.experts)
            else:
                yield from self._mlp(f"{prefix}.mlp", self.family.mlp, self.shape.intermediate_size)
            for name in self._norms():
                yield from self._norm(f"{prefix}.{name}", hidden)
        yield from self._norm(f"model.{self.family.final_norm}", hidden)
        if not self.shape.is_tied:
            yield "lm_head.weight", (vocab, hidden), False
            if self.family.head_bias:
                yield "lm_head.bias", (vocab,), False

    def _attention(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...], bool]]:
        shape, family = self.shape, self.family
        q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        rows = {"qkv_proj": q + 2 * kv} if family.is_qkv_fused else {"q_proj": q, "k_proj": kv, "v_proj": kv}
        for name, count in rows.items():
            yield from self._linear(f"{prefix}.{name}", count, shape.hidden_size, family.qkv_bias)
        yield from self._linear(f"{prefix}.{family.o_name}", shape.hidden_size, q, family.o_bias)
        if family.has_qk_norm:
            yield from self._norm(f"{prefix}.q_norm", shape.head_dim)
            yield from self._norm(f"{prefix}.k_norm", shape.head_dim)

    def _latent(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...], bool]]:
        """Multi-head latent attention: queries through a low rank if config.json has one, keys and values always."""
        shape, hidden = self.shape, self.shape.hidden_size
        rank, rope = shape.kv_lora_rank, shape.qk_rope_head_dim
        value = read_size(self.config, "v_head_dim")
        if self.config.get("q_lora_rank"):
            low = read_size(self.config, "q_lora_rank")
            yield from self._linear(f"{prefix}.q_a_proj", low, hidden, _ATTENTION)
            yield from self._norm(f"{prefix}.q_a_layernorm", low)
            yield from self._linear(f"{prefix}.q_b_proj", shape.num_heads * shape.head_dim, low, _NO)
        else:
            yield from self._linear(f"{prefix}.q_proj", shape.num_heads * shape.head_dim, hidden, _NO)
        yield from self._linear(f"{prefix}.kv_a_proj_with_mqa", rank + rope, hidden, _ATTENTION)
        yield from self._norm(f"{prefix}.kv_a_layernorm", rank)
        rows = shape.num_heads * (shape.head_dim - rope + value)
        yield from self._linear(f"{prefix}.kv_b_proj", rows, rank, _NO)
        yield from self._linear(f"{prefix}.o_proj", hidden, shape.num_heads * value, _ATTENTION)

    def _experts(self, prefix: str, experts: ExpertShape) -> Iterator[tuple[str, tuple[int, ...], bool]]:
        router, routed, projections = self.family.experts
        yield f"{prefix}.{router}.weight", (experts.num_experts, self.shape.hidden_size), False
        if self.shape.architecture == "DeepseekV3ForCausalLM":
            yield f"{prefix}.{router}.e_score_correction_bias", (experts.num_experts,), False
        for expert in range(experts.num_experts):
            yield from self._mlp(f"{prefix}.{routed}.{expert}", projections, experts.intermediate_size)
        if self.family.shared and experts.shared_intermediate_size:
            yield from self._mlp(f"{prefix}.{self.family.shared}", _GATED, experts.shared_intermediate_size)
            if self.family.shared == "mlp.shared_expert":
                yield f"{prefix}.mlp.shared_expert_gate.weight", (1, self.shape.hidden_size), False

    def _mlp(self, prefix: str, names: tuple[str, ...], size: int) -> Iterator[tuple[str, tuple[int, ...], bool]]:
        for name in names[:-1]:
            rows = 2 * size if name == "gate_up_proj" else size
            yield from self._linear(f"{prefix}.{name}", rows, self.shape.hidden_size, self.family.mlp_bias)
        yield from self._linear(f"{prefix}.{names[-1]}", self.shape.hidden_size, size, self.family.mlp_bias)

    def _linear(
        self, prefix: str, rows: int, columns: int, bias: _Switch
    ) -> Iterator[tuple[str, tuple[int, ...], bool]]:
        yield f"{prefix}.weight", (rows, columns), True
        if bool(self.config.get(bias[0], bias[1])):
            yield f"{prefix}.bias", (rows,), False

    def _norm(self, prefix: str, size: int) -> Iterator[tuple[str, tuple[int, ...], bool]]:
        yield f"{prefix}.weight", (size,), False
        if self.family.norm_bias:
            yield f"{prefix}.bias", (size,), False

    def _norms(self) -> tuple[str, ...]:
        is_parallel = self.family.is_parallel and self.config.get("use_parallel_residual")
        return self.family.norms[:1] if is_parallel else self.family.norms
