"""GivenFlags: what the flags, variables and the file of --config say about a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GivenFlags:
    """The values that were given, by field, of EngineConfig, ServerSettings and SamplingParams."""

    engine: dict[str, Any]
    server: dict[str, Any]
    sampling: dict[str, Any]

    @property
    def groups(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        return self.engine, self.server, self.sampling
