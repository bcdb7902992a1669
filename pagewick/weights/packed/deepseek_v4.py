"""DeepSeek V4's own files: FP8 in blocks, and experts in FP4, both with scales that are powers of two (E8M0).

    .weight  [N, C] E4M3, or [N, C / 2] bytes of experts in FP4, two numbers in E2M1 in each, the lower half first
    .scale   of blocks, such as [N / 128, C / 128], or of 32 columns [N, C / 32]

config.json has quant_method fp8 and, beside quantization_config, expert_dtype. Experts in FP4 become ggml's MXFP4.

Source: https://huggingface.co/deepseek-ai/DeepSeek-V4-Flash (config.json and the headers of its files).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pagewick.weights.packed.fp4 import MXFP4
from pagewick.weights.packed.fp8 import Fp8Format, block_size
from pagewick.weights.packed.layout import PackedFormat, PackedRules
from pagewick.weights.packed.settings import Settings

_SCALE: Final = ".scale"
_EXPERTS: Final = (".ffn.experts.", ".mlp.experts.")
_FP4: Final = replace(MXFP4, packed=".weight", scale=_SCALE, scale_dtypes=("F8_E8M0",), packed_dtypes=("I8", "U8"))


def read_rules(settings: Settings) -> PackedRules:
    """Return what a quantization_config says, with expert_dtype among its entries. Raises ModelLoadError."""
    settings.demand("activation_scheme", ("dynamic",))
    settings.demand("fmt", ("e4m3",))
    settings.demand("scale_fmt", ("ue8m0",))
    settings.demand("expert_dtype", ("fp8", "fp4"))
    block = block_size(settings, "weight_block_size") if "weight_block_size" in settings else (128, 128)
    form = Fp8Format(block, scales=(_SCALE,))
    experts: PackedFormat = _FP4 if settings.get("expert_dtype") == "fp4" else form

    def format_of(prefix: str) -> PackedFormat:
        return experts if any(name in prefix for name in _EXPERTS) else form

    return PackedRules(form.label, (".weight", _SCALE), (_SCALE,), format_of)
