"""OPT and Galactica (OPT). Llama, except:

- Learned positions in place of rotation, of which the first token has the third row; layer norms; biases everywhere but
  in the head, which is tied to the embedding; an MLP without a gate.
- Large Galactica models have no biases (enable_bias), and norms without weights (layer_norm_elementwise_affine).
- OPT 350M alone has norms after attention and MLP, and embeddings of another size than hidden states; it is refused.
"""

from __future__ import annotations

from typing import Final

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.name_map import NameMap
from pagewick.models.parts import NormConfig

_NO_350M: Final = "OPT 350M, which is built in another way than the other models, is not supported"
_EPS: Final = 1e-5
# The row of the table of positions that the first token has.
_FIRST_ROW: Final = 2


def _names(owner: str) -> NameMap:
    return NameMap(
        parts=(
            ("model.embed_tokens", f"{owner}.embed_tokens"),
            ("model.embed_positions", f"{owner}.embed_positions"),
            ("model.layers", f"{owner}.layers"),
            ("model.norm", f"{owner}.final_layer_norm"),
            ("input_layernorm", "self_attn_layer_norm"),
            ("post_attention_layernorm", "final_layer_norm"),
            ("o_proj", "out_proj"),
            ("mlp.up_proj", "fc1"),
            ("mlp.down_proj", "fc2"),
        )
    )


def read_opt(entries: Entries) -> ModelConfig:
    entries = entries.renamed({"intermediate_size": "ffn_dim", "hidden_act": "activation_function"})
    entries = entries.filled({"max_position_embeddings": 2048})
    hidden_size = entries.size("hidden_size")
    entries.demand("do_layer_norm_before", True, True, _NO_350M)
    entries.demand("word_embed_proj_dim", hidden_size, hidden_size, _NO_350M)
    entries.demand("_remove_final_layer_norm", False, False)
    has_bias, has_weights = entries.flag("enable_bias", True), entries.flag("layer_norm_elementwise_affine", True)
    num_heads = entries.size("num_attention_heads")
    attention = reading.read_attention(entries, num_kv_heads=num_heads, qkv_bias=has_bias, o_bias=has_bias)
    activation = reading.read_activation(entries, "relu")
    mlp = reading.read_mlp(entries, activation=activation, is_gated=False, bias=has_bias)
    return reading.model_config(
        entries,
        tie_word_embeddings=True,
        norm=NormConfig(kind="layer", eps=_EPS, has_bias=has_weights, has_weight=has_weights),
        layers=reading.same_layers(reading.read_num_layers(entries), attention, mlp, None),
        num_position_embeddings=entries.size("max_position_embeddings") + _FIRST_ROW,
        position_offset=_FIRST_ROW,
        # Files that were written without the output layer have the second ones.
        names=(_names("model.decoder"), _names("decoder")),
        ignored=(r"(model\.)?decoder\.version",),
    )
