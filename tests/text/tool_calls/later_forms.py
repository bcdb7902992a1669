"""More calls as families publish them; see forms.py."""

from __future__ import annotations

from collections.abc import Sequence

from tests.text.tool_calls.forms import Call, dumped, enveloped


def firefunction(calls: Sequence[Call]) -> str:
    return f"functools{dumped(enveloped(calls))}"
