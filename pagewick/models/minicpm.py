"""MiniCPM3. Llama, except:

- Latent attention as in DeepSeek-V2, without experts; the rotated part of a head turns in pairs of halves.
- scale_emb multiplies embeddings, scale_depth / sqrt(num_hidden_layers) the outputs of attention and MLP, and
  dim_model_base / hidden_size the logits. The head is tied to the embedding.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.deepseek import latent_model
from pagewick.models.entries import Entries
from pagewick.models.parts import MlpConfig

_DEFAULTS: Final = {
    "kv_lora_rank": 256,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    # Null means that these change nothing.
    "scale_depth": 1.4,
    "dim_model_base": 256,
}


def read_minicpm3(entries: Entries) -> ModelConfig:
    entries = entries.filled(_DEFAULTS)
    hidden_size, num_layers = entries.size("hidden_size"), reading.read_num_layers(entries)
    value_size = entries.size("v_head_dim", max(1, hidden_size // entries.size("num_attention_heads")))
    mlp: MlpConfig = reading.read_mlp(entries, bias=entries.flag("mlp_bias", False))
    config = latent_model(
        entries.replaced({"v_head_dim": value_size}), [mlp] * num_layers, is_interleaved=False, default_eps=1e-5
    )
    depth = math.sqrt(num_layers)
    return replace(
        config,
        embedding_scale=entries.positive("scale_emb", 12.0),
        is_embedding_scale_rounded=True,
        residual_scale=entries.positive("scale_depth", depth) / depth,
        logit_scale=entries.positive("dim_model_base", float(hidden_size)) / hidden_size,
    )
