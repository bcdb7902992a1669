"""ModelEntry: one of the models that a server can load, with the settings of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pagewick.config import EngineConfig
from pagewick.server.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """settings.served_model_name: the names of the model. sampling: defaults of its requests, as for run_server.

    loads_at_start: whether the server is ready only once it is loaded. is_default: whether it takes requests that name
    no model. is_pinned: whether it stays loaded, once it is, until a client unloads it.
    """

    config: EngineConfig
    settings: ServerSettings
    sampling: Mapping[str, Any] = field(default_factory=dict)
    loads_at_start: bool = False
    is_default: bool = False
    is_pinned: bool = False

    @property
    def name(self) -> str:
        """The name by which the model is listed."""
        return self.settings.model_name

    @property
    def names(self) -> tuple[str, ...]:
        """All names that requests may use: those of the model, and of the adapters that it starts with."""
        return (*self.settings.served_model_name, *filter(None, self.config.adapter_paths))
