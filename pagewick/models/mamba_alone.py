"""Mamba-2 alone, as in Codestral Mamba: layers without attention and without an MLP, with one norm each.

Entries and tensors have names of their own, and files say nothing about the longest sequence: a state has no length.
"""

from __future__ import annotations

from typing import Final

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.mamba_entries import read_mamba
from pagewick.models.parts import LayerConfig, NameMap, NormConfig

_PARTS: Final = (
    ("mamba", "mixer"), ("input_layernorm", "norm"), ("model.norm", "model.norm_f"), ("model", "backbone"),
)  # fmt: skip
# The second name of the embeddings is that of the model's authors.
_NAMES: Final = (
    NameMap(parts=(("embed_tokens", "embeddings"), *_PARTS)), NameMap(parts=(("embed_tokens", "embedding"), *_PARTS)),
)  # fmt: skip
# The names of read_mamba, and those of these files.
_ALIASES: Final = {
    "mamba_n_heads": "num_heads", "mamba_d_head": "head_dim", "mamba_n_groups": "n_groups",
    "mamba_d_state": "state_size", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias",
    "mamba_expand": "expand",
}  # fmt: skip
# The default limit of a sequence in tokens, as something has to be reserved for each of them.
_LONGEST: Final = 2**20


def read_mamba2(entries: Entries) -> ModelConfig:
    entries = entries.renamed(_ALIASES)
    entries = entries.filled({"n_groups": 8, "state_size": 128, "max_position_embeddings": _LONGEST})
    eps = entries.positive("layer_norm_epsilon", 1e-5)
    mamba = read_mamba(entries, norm_eps=eps, has_bias=entries.flag("use_bias", False))
    layer = LayerConfig(attention=mamba, mlp=None, rope=None)
    return reading.model_config(
        entries,
        norm=NormConfig(eps=eps),
        layers=(layer,) * reading.read_num_layers(entries),
        has_wide_residual=entries.flag("residual_in_fp32", True),
        names=_NAMES,
    )
