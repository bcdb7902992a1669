"""How the served model wants its images, wherever its files say it. The API reads it as well. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from pagewick.config import EngineConfig
from pagewick.images.settings import ImageSettings
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
        settings = ImageSettings.of_entries(vision.processor_entries(), vision.where)
    elif ImageSettings.are_in(directory):
        settings = ImageSettings.read(directory)
    else:
        return None
    return settings if config.max_image_pixels is None else settings.limited(config.max_image_pixels)
