"""Whether Pagewick runs a model. It asks the code that would load the model, and decides nothing itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagewick.errors import ModelLoadError, PagewickError
from pagewick.log import printable
from pagewick.models.config import ModelConfig, architecture_of
from pagewick.models.registry import known_as, nearest_to, read_config


@dataclass(frozen=True, slots=True)
class Verdict:
    """reason: why the model does not run; empty if it does. fix: what to do then; empty if nothing helps.

    nearest: the supported architecture whose name is most similar.
    """

    runs: bool
    reason: str = ""
    nearest: str = ""
    fix: str = ""


def read_model(config: Mapping[str, Any]) -> tuple[ModelConfig | None, Verdict]:
    """The model that a config.json describes; None, with the reason, if Pagewick does not run such a model."""
    try:
        architecture = architecture_of(config)
        if known_as(architecture) is None:
            kind = config.get("model_type")
            named = f"{architecture} (model_type {printable(kind[:80])})" if isinstance(kind, str) else architecture
            nearest = nearest_to(architecture)
            fix = f"the nearest that runs: {nearest}" if nearest else ""
            return None, Verdict(False, f"{named} is not supported yet", nearest, fix)
        return read_config(config), Verdict(True)
    except ModelLoadError as error:
        return None, refusal(error)


def refusal(error: PagewickError) -> Verdict:
    """The verdict for what loading raises: the first line says why, the last one, if there are more, what to do."""
    reason, *more = str(error).splitlines()
    return Verdict(False, reason, fix=more[-1].strip() if more else "")
