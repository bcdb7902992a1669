"""Addresses of models on the web, which people copy from a hub's page in place of the model's id."""

from __future__ import annotations

import re
from typing import Final

_SCHEME: Final = re.compile(r"(?:https?|hf)://", re.IGNORECASE)
_HUB: Final = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co|(?P<other>modelscope\.cn)/models)/", re.I)
_MODEL: Final = re.compile(r"(?P<id>[\w.-]+/[\w.-]+(?::[\w.-]+)?)(?:/(?:blob|resolve)/[^/]+(?P<file>/[^?#]+\.gguf))?")


def is_address(model: str) -> bool:
    """Whether the name of a model is an address on the web, or begins with the name of a hub's server."""
    return _SCHEME.match(model) is not None or _HUB.match(model) is not None


def name_of(address: str) -> str | None:
    """Return what to give in place of an address: an id, with the flag of its hub; None if it is not on a hub."""
    hub = _HUB.match(address)
    found = _MODEL.match(address, hub.end() if hub else 0)
    if hub is None or found is None:
        return None
    return found["id"] + (found["file"] or "") + (" --hub modelscope" if hub["other"] else "")
