"""The names that files give to the tensors of encoders of images, as regular expressions. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

TENSORS: Final = r"(model\.)?visual\..*"
"""A regular expression of the names that files of Qwen's models give to the tensors of a vision encoder."""

TOWER_TENSORS: Final = r"(model\.)?(vision_tower|multi_modal_projector)\..*"
"""A regular expression of the names that files of Mistral's models, Gemma 3, LFM2-VL and InternVL give to those."""

LIGHTON_TENSORS: Final = r"(model\.)?(vision_encoder|vision_projection)\..*"
"""A regular expression of the names that files of LightOnOCR give to those tensors."""

GEMMA4_TENSORS: Final = r"(model\.)?(vision_tower|embed_vision)\..*"
"""A regular expression of the names that files of Gemma 4 give to those tensors."""

CONNECTOR_TENSORS: Final = r"model\.(vision_model|connector)\..*"
"""A regular expression of the names that files of Idefics3 and SmolVLM give to those tensors."""

MINICPM_TENSORS: Final = r"(model\.)?(vision_tower|merger)\..*"
"""A regular expression of the names that files of MiniCPM-V give to those tensors."""

MOON_TENSORS: Final = r"(model\.)?(vision_tower|mm_projector)\..*"
"""A regular expression of the names that files of Kimi K2.5 give to those tensors."""

LLAMA4_TENSORS: Final = r"(model\.)?(vision_model|multi_modal_projector)\..*"
"""A regular expression of the names that files of Llama 4 give to those tensors."""

LLAVA_TENSORS: Final = r"(model\.)?((vision_tower|multi_modal_projector)\..*|image_newline)"
"""A regular expression of the names that files of LLaVA-NeXT give to those tensors."""

PADDLE_TENSORS: Final = r"((model\.)?(visual|projector)|mlp_AR)\..*"
"""A regular expression of the names that files of PaddleOCR-VL give to those tensors."""

MISTRAL_TENSORS: Final = r"(vision_encoder|pre_mm_projector_norm|patch_merger|vision_language_adapter)\..*"
"""A regular expression of Mistral's own names of those tensors, which files of Mistral Large 4 have."""

CROP_TENSORS: Final = r"(model\.)?vision\..*"
"""A regular expression of the names that files of Moondream 2 give to those tensors."""

BLIP_TENSORS: Final = r"vision_model\..*"
"""A regular expression of the names that files of BLIP give to those tensors."""

ENCODER_TENSORS: Final = (
    TENSORS, TOWER_TENSORS, GEMMA4_TENSORS, CONNECTOR_TENSORS, LIGHTON_TENSORS, MINICPM_TENSORS, MOON_TENSORS,
    MISTRAL_TENSORS, LLAMA4_TENSORS, PADDLE_TENSORS, LLAVA_TENSORS,
)  # fmt: skip


def without_encoders(ignored: Iterable[str]) -> tuple[str, ...]:
    """Return the patterns of ignored tensors for a model whose encoder is used.

    All patterns of encoders are left out, because some tensors match several of them.
    """
    return tuple(pattern for pattern in ignored if pattern not in ENCODER_TENSORS)
