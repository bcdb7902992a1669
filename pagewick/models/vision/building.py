"""Builds the vision encoder that a VisionConfig describes."""

from __future__ import annotations

from pagewick.layers.context import LayerContext
from pagewick.models.vision.blip import BlipEncoder
from pagewick.models.vision.clip import ClipEncoder, JoiningClipEncoder
from pagewick.models.vision.config import (
    BlipVisionConfig,
    Gemma4VisionConfig,
    GlmVisionConfig,
    PixtralConfig,
    SiglipConfig,
    VisionConfig,
)
from pagewick.models.vision.crops import CropEncoder
from pagewick.models.vision.encoder import VisionEncoder
from pagewick.models.vision.gemma4 import Gemma4Encoder
from pagewick.models.vision.glm import GlmEncoder
from pagewick.models.vision.intern import InternEncoder
from pagewick.models.vision.lfm3 import Lfm3Encoder
from pagewick.models.vision.llama4 import Llama4Encoder
from pagewick.models.vision.merging_config import (
    ClipVisionConfig,
    CropVisionConfig,
    InternVisionConfig,
    Lfm3VisionConfig,
    Llama4VisionConfig,
    MergingSiglipConfig,
    MiniCPMVisionConfig,
    MoonVisionConfig,
    PaddleVisionConfig,
)
from pagewick.models.vision.minicpm import MiniCPMEncoder
from pagewick.models.vision.moon import MoonEncoder
from pagewick.models.vision.pixels import PatchReader
from pagewick.models.vision.pixtral import PixtralEncoder
from pagewick.models.vision.siglip import (
    RoundingSiglipEncoder,
    SiglipEncoder,
    SquareSiglipEncoder,
    StretchingSiglipEncoder,
    TurningSiglipEncoder,
)


def build_encoder(context: LayerContext, prefix: str, config: VisionConfig) -> PatchReader:
    """Return an encoder with uninitialised weights. Raises ConfigError if there are more ranks than heads."""
    if isinstance(config, PixtralConfig):
        return PixtralEncoder(context, prefix, config)
    if isinstance(config, SiglipConfig):
        return SiglipEncoder(context, prefix, config)
    if isinstance(config, MergingSiglipConfig):
        if config.is_stretched:
            return StretchingSiglipEncoder(context, prefix, config)
        return (RoundingSiglipEncoder if config.is_rounded else SquareSiglipEncoder)(context, prefix, config)
    if isinstance(config, ClipVisionConfig):
        is_joining = config.largest_canvas is not None
        return (JoiningClipEncoder if is_joining else ClipEncoder)(context, prefix, config)
    if isinstance(config, CropVisionConfig):
        return CropEncoder(context, prefix, config)
    if isinstance(config, PaddleVisionConfig):
        return TurningSiglipEncoder(context, prefix, config)
    if isinstance(config, MiniCPMVisionConfig):
        return MiniCPMEncoder(context, prefix, config)
    if isinstance(config, MoonVisionConfig):
        return MoonEncoder(context, prefix, config)
    if isinstance(config, Llama4VisionConfig):
        return Llama4Encoder(context, prefix, config)
    if isinstance(config, InternVisionConfig):
        return InternEncoder(context, prefix, config)
    if isinstance(config, Lfm3VisionConfig):
        return Lfm3Encoder(context, prefix, config)
    if isinstance(config, GlmVisionConfig):
        return GlmEncoder(context, prefix, config)
    if isinstance(config, BlipVisionConfig):
        return BlipEncoder(context, prefix, config)
    if isinstance(config, Gemma4VisionConfig):
        return Gemma4Encoder(context, prefix, config)
    return VisionEncoder(context, prefix, config)
