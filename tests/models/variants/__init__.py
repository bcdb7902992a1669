"""Every architecture in every variant: name -> Variant."""

from __future__ import annotations

from tests.models.variants import (
    bailing,
    deepseek,
    deepseek_v4,
    falcon,
    gemma,
    gemma3n,
    gemma4,
    glm,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    hunyuan,
    joint_norms,
    kimi_linear,
    lfm2,
    llama,
    llama4,
    mamba,
    mistral,
    mistral_large4,
    opt,
    others,
    phi,
    qwen,
    qwen4,
    qwen_next,
    since_2025,
    since_2026,
    stablelm,
    starcoder,
    ungated,
)
from tests.models.variants.variant import COMMON, Variant

__all__ = ["COMMON", "VARIANTS", "Variant"]

VARIANTS: dict[str, Variant] = {
    name: variant
    for family in (
        llama,
        llama4,
        mistral,
        qwen,
        qwen_next,
        qwen4,
        phi,
        stablelm,
        falcon,
        gemma,
        gemma3n,
        gemma4,
        glm,
        deepseek,
        mistral_large4,
        deepseek_v4,
        kimi_linear,
        bailing,
        starcoder,
        granite,
        gpt2,
        gpt_neox,
        gpt_oss,
        hunyuan,
        joint_norms,
        lfm2,
        mamba,
        opt,
        others,
        since_2025,
        since_2026,
        ungated,
    )
    for name, variant in family.VARIANTS.items()
}
