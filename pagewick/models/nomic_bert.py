"""NomicBERT (arXiv:2402.01613): BERT with rotary embedding and gated MLPs, without biases. In the form of its files."""

from __future__ import annotations

from typing import Final

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.encoding import ENCODER_DTYPE, as_encoder
from pagewick.models.entries import Entries
from pagewick.models.name_map import NameMap
from pagewick.models.parts import EncoderConfig, NormConfig

_NAMES: Final = (
    ("model.embed_tokens", "model.embeddings.word_embeddings"),
    ("model.embed_types", "model.embeddings.token_type_embeddings"),
    ("model.embed_norm", "model.emb_ln"),
    ("model.layers", "model.encoder.layers"),
    ("self_attn.qkv_proj", "attn.Wqkv"),
    ("self_attn.o_proj", "attn.out_proj"),
    ("mlp.up_proj", "mlp.fc11"),
    ("mlp.gate_proj", "mlp.fc12"),
    ("mlp.down_proj", "mlp.fc2"),
    ("post_attention_layernorm", "norm1"),
    ("post_feedforward_layernorm", "norm2"),
)
_IGNORED: Final = (r"(.*\.)?pooler\..*", r"cls\..*")
_TRAINED_POSITIONS: Final = 2048
_DEFAULTS: Final = {
    "vocab_size": 30528, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "max_position_embeddings": _TRAINED_POSITIONS, "type_vocab_size": 2,
}  # fmt: skip
# transformers' names of entries, and those of the published files.
_ALIASES: Final = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
    "intermediate_size": "n_inner", "layer_norm_eps": "layer_norm_epsilon", "hidden_act": "activation_function",
    "rope_theta": "rotary_emb_base",
}  # fmt: skip
# Entries of published files that would change the model, with the only value that is supported.
_PLAIN: Final = {
    "qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False, "prenorm": False, "parallel_block": False,
    "use_rms_norm": False, "rotary_emb_interleaved": False, "rotary_emb_scale_base": None, "causal": False,
    "num_experts": None,
}  # fmt: skip


def read_nomic_bert(entries: Entries) -> ModelConfig:
    defaults = dict(_DEFAULTS)
    if "n_embd" in entries:
        # A published file. Its rotary_scaling_factor counts beyond the length of the training only, which is the limit.
        trained = entries.size("max_trained_positions", _TRAINED_POSITIONS)
        entries = entries.replaced({"max_position_embeddings": trained})
        defaults = {name: value for name, value in defaults.items() if _ALIASES.get(name, "") not in entries}
    entries = entries.filled(defaults).renamed(_ALIASES)
    for name, supported in _PLAIN.items():
        entries.demand(name, supported, supported)
    entries.demand("rotary_emb_fraction", 1.0, 1.0)
    activation = entries.choice("hidden_act", ("silu", "swiglu"), "silu")
    attention = reading.read_attention(entries, layout="fused")
    mlp = reading.read_mlp(entries, activation={"swiglu": "silu"}.get(activation, activation))
    rope = reading.read_rope_of(entries, attention, default_theta=1000.0)
    model = reading.model_config(
        entries,
        dtype=reading.read_dtype(entries, ENCODER_DTYPE),
        has_embedding_norm=True,
        block="post_ln",
        norm=NormConfig(kind="layer", eps=entries.positive("layer_norm_eps", 1e-12), has_bias=True),
        layers=reading.same_layers(reading.read_num_layers(entries), attention, mlp, rope),
        names=(NameMap(parts=_NAMES),),
        ignored=_IGNORED,
    )
    types = entries.count("type_vocab_size")
    return as_encoder(model, entries, EncoderConfig(num_token_types=types, has_final_norm=False))
