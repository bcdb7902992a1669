"""How the served model wants its images, wherever its files say it. The API reads it as well. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pagewick.config import EngineConfig
from pagewick.images.settings import ImageSettings
from pagewick.images.settings_files import has_settings, read_settings, settings_of
from pagewick.weights.description import is_gguf
from pagewick.weights.gguf.checkpoint import open_vision


def image_settings(config: EngineConfig) -> ImageSettings | None:
    """Return the settings of the model in `config.model`, within its limit of pixels; None if its files have none.

    config: names files on this disk. Raises ConfigError for a limit below one token, and ModelLoadError for settings
    that cannot be honoured.
    """
    directory = Path(config.model)
    if is_gguf(directory):
        if config.mmproj is None:
            return None
        vision = open_vision(Path(config.mmproj))
        files = vision.processor_files()
        settings = settings_of(files.image, vision.where, files.config, files.processor)
    elif has_settings(directory):
        settings = read_settings(directory)
    else:
        return None
    return settings if config.max_image_pixels is None else settings.limited(config.max_image_pixels)


def with_largest_picture(config: EngineConfig) -> EngineConfig:
    """Return a config whose max_image_pixels are those of the largest picture: an image, or a tile of it.

    Unchanged if the model's files have no settings. Raises as `image_settings`.
    """
    settings = image_settings(config)
    return config if settings is None else replace(config, max_image_pixels=settings.largest_picture)
