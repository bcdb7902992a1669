"""EngineHealth: whether an engine can be asked, and if not, why. Imports no torch."""

from __future__ import annotations

from typing import Literal

import msgspec

EngineState = Literal["loading", "ready", "hung", "restarting", "dead"]


class EngineHealth(msgspec.Struct, frozen=True):
    """state: "loading" for the first time; "ready"; "hung": alive without progress; "restarting": it died and is
    started anew; "dead": nobody starts it again. reason: a sentence for clients, empty if ready.
    retry_after_s: when a client may try again. num_restarts: how often it was started anew. num_failed_starts: how
    often in a row that failed.
    """

    state: EngineState
    reason: str = ""
    retry_after_s: int = 5
    num_restarts: int = 0
    num_failed_starts: int = 0
