"""The lines that a server logs as it starts: which options change nothing with its model."""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import Final

from pagewick.async_llm import AsyncEngine
from pagewick.engine.admission import writes_text
from pagewick.option_checks import flag_of
from pagewick.server.core.thinking import ThinkingModel, warn_without_effect
from pagewick.server.settings import ServerSettings

_logger = logging.getLogger(__name__)

# Settings about requests for text.
_OF_TEXTS: Final = (
    "reasoning_parser", "tool_call_parser", "thinking", "thinking_budget", "record_conversation", "stream_interval",
)  # fmt: skip


def warn_at_start(settings: ServerSettings, engine: AsyncEngine) -> None:
    """Log a warning about each setting, and each default of requests that a user chose, that changes nothing."""
    if writes_text(engine.info):
        warn_without_effect(settings, ThinkingModel.of(engine))
        return
    usual = {option.name: option.default for option in fields(settings)}
    names = sorted(engine.chosen_defaults)
    names += [name for name in _OF_TEXTS if getattr(settings, name) != usual[name]]
    for name in names:
        _logger.warning("%s has no effect: this model writes no text", flag_of(name))
