"""EngineHealth: whether an engine can take requests, and if not, why. Imports no torch."""

from __future__ import annotations

from typing import Literal

import msgspec

EngineState = Literal["loading", "ready", "hung", "restarting", "dead"]


class EngineHealth(msgspec.Struct, frozen=True):
    """The state of an engine, and what clients are told about it.

    state: "loading": the first start; "ready"; "hung": alive without progress; "restarting": it died and is started
    again; "dead": it is not started again. reason: a sentence for clients, empty if ready. retry_after_s: seconds until
    a client should try again. num_restarts: number of restarts so far. num_failed_starts: number of failed starts since
    the last success.
    """

    state: EngineState
    reason: str = ""
    retry_after_s: int = 5
    num_restarts: int = 0
    num_failed_starts: int = 0
