"""NanoChat. Llama, except:

- Norms have no weights. The embeddings are normalised, too, and so are queries and keys per head, after their rotation.
- Heads are rotated in the other direction.
- An MLP without a gate; its activation is the square of a ReLU. Logits have a soft cap.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.name_map import NameMap
from pagewick.models.parts import HeadNormConfig, NormConfig

_NAMES: Final = NameMap(parts=(("mlp.up_proj", "mlp.fc1"), ("mlp.down_proj", "mlp.fc2")))


def read_nanochat(entries: Entries) -> ModelConfig:
    entries = entries.filled({"max_position_embeddings": 2048, "final_logit_softcapping": 15.0})
    eps, has_bias = entries.positive("rms_norm_eps", 1e-6), entries.flag("attention_bias", False)
    head_norm = HeadNormConfig(eps=eps, has_weight=False, is_after_rotation=True)
    attention = reading.read_attention(entries, qkv_bias=has_bias, o_bias=has_bias, head_norm=head_norm)
    mlp = reading.read_mlp(entries, activation=reading.read_activation(entries, "relu2"), is_gated=False)
    rope = replace(reading.read_rope_of(entries, attention), is_reversed=True)
    if rope.kind == "dynamic":
        raise entries.wrong("rope_parameters", "without dynamic scaling, which is not supported here")
    return reading.model_config(
        entries,
        norm=NormConfig(eps=eps, has_weight=False),
        has_embedding_norm=True,
        layers=reading.same_layers(reading.read_num_layers(entries), attention, mlp, rope),
        logit_soft_cap=entries.optional_positive("final_logit_softcapping"),
        names=(_NAMES,),
    )
