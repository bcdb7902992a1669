"""Mamba, FalconMamba and Mamba-2 alone, as in Codestral Mamba: layers of one part, with one norm each.

FalconMamba is Mamba-1 that divides steps, keys and queries by their root mean squares. Entries and tensors have names
of their own, and files say nothing about the longest sequence: a state has no length.
"""

from __future__ import annotations

from typing import Final

from pagewick.layers.state_config import ChannelScanConfig, MambaConfig
from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.mamba_entries import read_mamba
from pagewick.models.name_map import NameMap
from pagewick.models.parts import LayerConfig, NormConfig

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
    mamba = read_mamba(entries, norm_eps=_read_eps(entries), has_bias=entries.flag("use_bias", False))
    return _model(entries, mamba, is_tied=False)


def read_mamba1(entries: Entries) -> ModelConfig:
    return _read_mamba1(entries, norm_eps=None)


def read_falcon_mamba(entries: Entries) -> ModelConfig:
    return _read_mamba1(entries, norm_eps=entries.positive("mixer_rms_eps", 1e-6))


def _read_mamba1(entries: Entries, *, norm_eps: float | None) -> ModelConfig:
    entries = entries.filled({"max_position_embeddings": _LONGEST})
    # The convolution's activation and the gates'.
    entries.demand("hidden_act", "silu", "silu")
    hidden_size, rank = entries.size("hidden_size"), entries.get("time_step_rank")
    conv_size = entries.size("conv_kernel", 4)
    if conv_size < 2:
        raise entries.wrong("conv_kernel", "a whole number above 1")
    scan = ChannelScanConfig(
        # FalconMamba's file has 16 as expand, which is not meant: intermediate_size counts.
        num_channels=entries.size("intermediate_size", entries.size("expand", 2) * hidden_size),
        state_dim=entries.size("state_size", 16),
        step_rank=-(-hidden_size // 16) if rank in (None, "auto") else entries.size("time_step_rank"),
        conv_size=conv_size,
        has_bias=entries.flag("use_bias", False),
        has_conv_bias=entries.flag("use_conv_bias", True),
        norm_eps=norm_eps,
    )
    return _model(entries, scan, is_tied=True)


def _read_eps(entries: Entries) -> float:
    return entries.positive("layer_norm_epsilon", 1e-5)


def _model(entries: Entries, mixer: MambaConfig | ChannelScanConfig, *, is_tied: bool) -> ModelConfig:
    """is_tied: the family's default."""
    layer = LayerConfig(attention=mixer, mlp=None, rope=None)
    return reading.model_config(
        entries,
        tie_word_embeddings=is_tied,
        norm=NormConfig(eps=_read_eps(entries)),
        layers=(layer,) * reading.read_num_layers(entries),
        has_wide_residual=entries.flag("residual_in_fp32", True),
        names=_NAMES,
    )
