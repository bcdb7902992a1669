"""LFM2, LFM2 with experts (arXiv:2511.23404), LFM3, and LFM2-VL and LFM3-VL, which read images. Llama, except:

- Most layers have a gated short convolution in place of attention.
- In the others, queries and keys are normalised per head.
- The size of an MLP is two thirds of intermediate_size, rounded up, unless block_auto_adjust_ff_dim is false.
- With experts: chosen by sigmoid plus a learned bias, with normalised weights, in all layers but the first ones.
- LFM3: further norms after attention and MLP; a window in every other layer with attention, whose rotation is another
  one; each head's output has a gate of one number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pagewick.layers.config import MoeConfig
from pagewick.layers.state_config import ConvolutionConfig
from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.multimodal import read_text_part, text_entries
from pagewick.models.name_map import NameMap
from pagewick.models.parts import HeadNormConfig, LayerConfig, MlpConfig, NormConfig
from pagewick.models.vision.lfm3_entries import with_lfm3_vl
from pagewick.models.vision.merging_siglip_entries import with_lfm2_vl

_CONVOLUTION: Final = "conv"
_NAMES: Final = NameMap(
    parts=(
        ("short_conv", "conv"),
        ("o_proj", "out_proj"),
        ("q_norm", "q_layernorm"),
        ("k_norm", "k_layernorm"),
        ("mlp.gate.e_score_correction_bias", "mlp.expert_bias"),
        ("mlp", "feed_forward"),
        ("gate_proj", "w1"),
        ("down_proj", "w2"),
        ("up_proj", "w3"),
        ("input_layernorm", "operator_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("model.norm", "model.embedding_norm"),
        # The text parts of LFM2-VL and LFM3-VL.
        ("language_model.norm", "language_model.embedding_norm"),
    )
)
_SANDWICH_NAMES: Final = NameMap(
    parts=(
        ("post_attention_layernorm", "post_operator_norm"),
        ("pre_feedforward_layernorm", "ffn_norm"),
        ("post_feedforward_layernorm", "post_ffn_norm"),
        *(part for part in _NAMES.parts if part[0] not in ("post_attention_layernorm", "o_proj", "q_norm", "k_norm")),
        # Behind the gates of MLPs, which have this name, too, before they are renamed.
        ("g_proj", "gate_proj"),
    )
)
_LFM3_DEFAULTS: Final = {
    "max_position_embeddings": 128000,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "sliding_window": 256,
    "rope_parameters": {
        reading.SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        reading.FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    },
}
# Old files have other names of some entries.
_OLD_NAMES: Final = {"intermediate_size": "block_ff_dim", "tie_word_embeddings": "tie_embedding"}


def read_lfm2(entries: Entries) -> ModelConfig:
    entries = _renewed(entries)
    mlp = MlpConfig(intermediate_size=_inner_size(entries))
    return _read(entries, [mlp] * reading.read_num_layers(entries))


def read_lfm2_vl(entries: Entries) -> ModelConfig:
    """LFM2-VL and LFM2.5-VL: the text part is LFM2's."""
    if entries.get("tie_embedding") is not None:
        # An older name of the entry, which counts where a file has both.
        entries = entries.replaced({"tie_word_embeddings": entries.flag("tie_embedding")})
    kind = text_entries(entries).choice("model_type", ("lfm2", "lfm2_moe"), "lfm2")
    read = read_lfm2 if kind == "lfm2" else read_lfm2_moe
    return with_lfm2_vl(read_text_part(entries, read, is_tied=True), entries)


def read_lfm2_moe(entries: Entries) -> ModelConfig:
    entries = _renewed(entries).filled({"intermediate_size": 7168})
    num_layers, num_experts = reading.read_num_layers(entries), entries.size("num_experts", 32)
    moe = reading.make_moe(
        {
            "top_k": entries.size("num_experts_per_tok", 4, most=num_experts),
            "scoring": "sigmoid",
            "renormalize": entries.flag("norm_topk_prob", True),
            "epsilon": 1e-6,
            "scaling": entries.positive("routed_scaling_factor", 1.0),
        },
        num_experts=num_experts,
        intermediate_size=entries.size("moe_intermediate_size", 1792),
        has_router_bias=entries.flag("use_expert_bias", True),
    )
    num_dense = min(entries.count("num_dense_layers", 2), num_layers)
    dense = [MlpConfig(intermediate_size=entries.size("intermediate_size"))] * num_dense
    return _read(entries, [*dense, *[moe] * (num_layers - num_dense)])


def read_lfm3(entries: Entries) -> ModelConfig:
    entries = entries.filled(_LFM3_DEFAULTS)
    entries.demand("use_sandwich_norm", True, True)
    eps, has_bias = entries.positive("norm_eps", 1e-5), entries.flag("attention_bias", False)
    attention = reading.read_attention(
        entries,
        qkv_bias=has_bias,
        o_bias=has_bias,
        head_norm=HeadNormConfig(eps=eps),
        has_head_gates=entries.flag("use_attention_gate", True),
    )
    mlp, convolution = MlpConfig(intermediate_size=entries.size("intermediate_size")), _convolution(entries, 7)
    made = {_CONVOLUTION: LayerConfig(attention=convolution, mlp=mlp, rope=None)}
    for kind, theta in ((reading.FULL, 1e6), (reading.SLIDING, 1e4)):
        rope = reading.read_rope_of(
            entries, attention, layer_type=kind, default_theta=theta, may_be_proportional=kind == reading.FULL
        )
        window = entries.size("sliding_window") if kind == reading.SLIDING else None
        made[kind] = LayerConfig(attention=attention, mlp=mlp, rope=rope, window=window)
    num_layers = reading.read_num_layers(entries)
    kinds = entries.texts("layer_types") or tuple(_usual_kind(idx) for idx in range(num_layers))
    if len(kinds) != num_layers or set(kinds) - set(made) or not {reading.FULL, reading.SLIDING} & set(kinds):
        raise entries.wrong("layer_types", f"a list of num_hidden_layers ({num_layers}) kinds of {', '.join(made)}")
    return reading.model_config(
        entries.replaced({"layer_types": None}),
        tie_word_embeddings=True,
        block="sandwich",
        norm=NormConfig(eps=eps),
        layers=tuple(made[kind] for kind in kinds),
        names=(_SANDWICH_NAMES,),
    )


def read_lfm3_vl(entries: Entries) -> ModelConfig:
    """LFM3-VL: the text part is LFM3's."""
    text_entries(entries).choice("model_type", ("lfm3",), "lfm3")
    return with_lfm3_vl(read_text_part(entries, read_lfm3, is_tied=True), entries)


def _usual_kind(layer_idx: int) -> str:
    """Return the kind of a layer of LFM3 whose file has no layer_types."""
    if layer_idx % 4 == 2:
        return reading.FULL
    return reading.SLIDING if layer_idx % 4 == 0 and layer_idx > 0 else _CONVOLUTION


def _convolution(entries: Entries, default_size: int) -> ConvolutionConfig:
    conv_size = entries.size("conv_L_cache", default_size)
    if conv_size < 2:
        raise entries.wrong("conv_L_cache", "a whole number above 1")
    return ConvolutionConfig(
        num_channels=entries.size("hidden_size"), conv_size=conv_size, has_bias=entries.flag("conv_bias", False)
    )


def _renewed(entries: Entries) -> Entries:
    """Return the entries under their new names; where a file has both, the old ones count, as in transformers."""
    given = {new: entries.get(old) for new, old in _OLD_NAMES.items() if entries.get(old) is not None}
    return entries.replaced(given).filled({"max_position_embeddings": 128000, "num_key_value_heads": 8})


def _inner_size(entries: Entries) -> int:
    size = entries.size("intermediate_size", 12288)
    if not entries.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(int(2 * size / 3) * entries.positive("block_ffn_dim_multiplier", 1.0))
    multiple = entries.size("block_multiple_of", 256)
    return -(-size // multiple) * multiple


def _read(entries: Entries, mlps: Sequence[MlpConfig | MoeConfig]) -> ModelConfig:
    eps = entries.positive("norm_eps", 1e-5)
    attention = reading.read_attention(entries, head_norm=HeadNormConfig(eps=eps))
    rope = reading.read_rope_of(entries, attention, default_theta=1e6)
    convolution = _convolution(entries, 3)
    layers = [
        LayerConfig(attention=convolution, mlp=mlp, rope=None)
        if kind == _CONVOLUTION
        else LayerConfig(attention=attention, mlp=mlp, rope=rope)
        for kind, mlp in zip(_kinds(entries), mlps, strict=True)
    ]
    return reading.model_config(
        entries.replaced({"layer_types": None}),
        tie_word_embeddings=True,
        norm=NormConfig(eps=eps),
        layers=tuple(layers),
        names=(_NAMES,),
    )


def _kinds(entries: Entries) -> Sequence[str]:
    """Return the kind of each layer: by layer_types, or by the indices of those with attention in old files."""
    num_layers, known = reading.read_num_layers(entries), (_CONVOLUTION, reading.FULL)
    kinds = entries.texts("layer_types")
    if kinds is None:
        full = entries.sizes("full_attn_idxs", least=0)
        places = range(num_layers) if full is None else full
        kinds = tuple(reading.FULL if idx in places else _CONVOLUTION for idx in range(num_layers))
    if len(kinds) != num_layers or set(kinds) - set(known) or reading.FULL not in kinds:
        expected = f"a list of num_hidden_layers ({num_layers}) kinds, {known[0]} or {known[1]}, at least one of these"
        raise entries.wrong("layer_types", expected)
    return kinds
