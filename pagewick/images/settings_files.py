"""Reads how a model wants its images from the files in its directory; which family it is of, they say as well.

Every function raises ModelLoadError for settings that are missing or cannot be honoured.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagewick.errors import ModelLoadError
from pagewick.images import (
    blip_settings,
    cohere_settings,
    gemma3_settings,
    gemma4_settings,
    glm_settings,
    idefics3_settings,
    internvl_settings,
    kimi_settings,
    lfm2_vl_settings,
    lighton_settings,
    llama4_settings,
    llava_next_settings,
    llava_onevision_settings,
    llava_settings,
    minicpm_settings,
    moondream_settings,
    paddle_settings,
    pixtral_settings,
    qwen_settings,
)
from pagewick.images.blip_settings import BlipSettings
from pagewick.images.cohere_settings import CohereSettings
from pagewick.images.entries import FIX, Entries, SettingsFiles, read_object
from pagewick.images.gemma3_settings import Gemma3Settings
from pagewick.images.gemma4_settings import Gemma4Settings
from pagewick.images.glm_settings import GlmSettings
from pagewick.images.idefics3_settings import Idefics3Settings
from pagewick.images.internvl_settings import InternVLSettings
from pagewick.images.kimi_settings import KimiSettings
from pagewick.images.lfm2_vl_settings import Lfm2VlSettings
from pagewick.images.lighton_settings import LightOnSettings
from pagewick.images.llama4_settings import Llama4Settings
from pagewick.images.llava_next_settings import LlavaNextSettings
from pagewick.images.llava_onevision_settings import LlavaOnevisionSettings
from pagewick.images.llava_settings import LlavaSettings
from pagewick.images.minicpm_settings import MiniCPMSettings
from pagewick.images.moondream_settings import MoondreamSettings
from pagewick.images.paddle_settings import PaddleSettings
from pagewick.images.pixtral_settings import PixtralSettings
from pagewick.images.qwen_settings import QwenSettings
from pagewick.images.settings import ImageSettings

# image_processor_type -> the settings of the family. A file without the entry is of the first one.
_FAMILIES = {
    **dict.fromkeys(qwen_settings.PROCESSORS, QwenSettings.of),
    **dict.fromkeys(pixtral_settings.PROCESSORS, PixtralSettings.of),
    **dict.fromkeys(blip_settings.PROCESSORS, BlipSettings.of),
    **dict.fromkeys(cohere_settings.PROCESSORS, CohereSettings.of),
    **dict.fromkeys(gemma3_settings.PROCESSORS, Gemma3Settings.of),
    **dict.fromkeys(gemma4_settings.PROCESSORS, Gemma4Settings.of),
    **dict.fromkeys(lfm2_vl_settings.PROCESSORS, Lfm2VlSettings.of),
    **dict.fromkeys(glm_settings.PROCESSORS, GlmSettings.of),
    **dict.fromkeys(idefics3_settings.PROCESSORS, Idefics3Settings.of),
    **dict.fromkeys(internvl_settings.PROCESSORS, InternVLSettings.of),
    **dict.fromkeys(kimi_settings.PROCESSORS, KimiSettings.of),
    **dict.fromkeys(llama4_settings.PROCESSORS, Llama4Settings.of),
    **dict.fromkeys(llava_next_settings.PROCESSORS, LlavaNextSettings.of),
    **dict.fromkeys(llava_onevision_settings.PROCESSORS, LlavaOnevisionSettings.of),
    **dict.fromkeys(llava_settings.PROCESSORS, LlavaSettings.of),
    **dict.fromkeys(minicpm_settings.PROCESSORS, MiniCPMSettings.of),
    **dict.fromkeys(paddle_settings.PROCESSORS, PaddleSettings.of),
}


def read_settings(directory: Path) -> ImageSettings:
    """Read the settings in a model directory.

    As in transformers, image_processor in processor_config.json comes before preprocessor_config.json. Moondream 2 has
    neither.
    """
    config = Entries(read_object(directory / "config.json") or {}, str(directory / "config.json"))
    if _architecture(config) in moondream_settings.ARCHITECTURES:
        return MoondreamSettings.of(config)
    whole = read_object(directory / "processor_config.json")
    entries: Any = None if whole is None else whole.get("image_processor")
    source = f"image_processor in {directory / 'processor_config.json'}"
    if entries is None:
        entries = read_object(directory / "preprocessor_config.json")
        source = str(directory / "preprocessor_config.json")
    if entries is None:
        message = f"{directory} has no preprocessor_config.json, which says how the model reads images; download it too"
        raise ModelLoadError(message)
    if not isinstance(entries, dict):
        raise ModelLoadError(f"{source} is not an object; {FIX}")
    processor = Entries(whole or {}, str(directory / "processor_config.json"))
    return _settings(SettingsFiles(Entries(entries, source), processor, config))


def has_settings(directory: Path) -> bool:
    """Return whether a model directory has settings."""
    config = Entries(read_object(directory / "config.json") or {}, str(directory / "config.json"))
    if _architecture(config) in moondream_settings.ARCHITECTURES:
        return True
    whole = read_object(directory / "processor_config.json") or {}
    return "image_processor" in whole or (directory / "preprocessor_config.json").is_file()


def settings_of(
    entries: Mapping[str, Any],
    source: str,
    config: Mapping[str, Any] | None = None,
    processor: Mapping[str, Any] | None = None,
) -> ImageSettings:
    """Read the entries of a preprocessor_config.json, of a config.json and of a processor_config.json.

    source: names all of them in errors.
    """
    return _settings(
        SettingsFiles(Entries(entries, source), Entries(processor or {}, source), Entries(config or {}, source))
    )


def _settings(files: SettingsFiles) -> ImageSettings:
    architecture = _architecture(files.config)
    if architecture in lighton_settings.ARCHITECTURES:
        return LightOnSettings.of(files)
    if architecture in paddle_settings.ARCHITECTURES:
        return PaddleSettings.of(files)
    if files.image.values.get(kimi_settings.MEDIA) is not None:
        return KimiSettings.of(files)
    files.image.demand_one_of("image_processor_type", tuple(_FAMILIES))
    return _FAMILIES[files.image.values.get("image_processor_type") or next(iter(_FAMILIES))](files)


def _architecture(config: Entries) -> Any:
    architectures = config.values.get("architectures")
    return architectures[0] if isinstance(architectures, list) and architectures else None
