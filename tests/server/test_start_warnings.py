"""A server that starts names the options that change nothing with its model."""

from __future__ import annotations

import logging

import pytest
from msgspec import structs

from pagewick.server.core.start_warnings import warn_at_start
from pagewick.server.settings import ServerSettings
from tests.fake_engine import FakeClient, fake_engine
from tests.log_lines import collected_lines


@pytest.mark.parametrize("changes", [{"embedding": "mean"}, {"num_labels": 2}])
def test_a_model_that_writes_no_text_has_no_use_for_options_about_texts(changes: dict[str, object]) -> None:
    client = FakeClient()
    client.info = structs.replace(client.info, **changes)
    engine = fake_engine(client)
    engine.chosen_defaults = frozenset(("temperature", "max_tokens"))
    settings = ServerSettings(thinking=True, tool_call_parser="hermes", host="localhost")
    with collected_lines(logging.WARNING) as lines:
        warn_at_start(ServerSettings(), fake_engine(client))
        warn_at_start(settings, engine)
    flags = ("--max-tokens", "--temperature", "--tool-call-parser", "--thinking")
    assert lines == [f"{flag} has no effect: this model writes no text" for flag in flags]


def test_a_model_that_writes_texts_uses_them() -> None:
    engine = fake_engine(FakeClient())
    engine.chosen_defaults = frozenset(("temperature",))
    with collected_lines(logging.WARNING) as lines:
        warn_at_start(ServerSettings(tool_call_parser="hermes"), engine)
    assert lines == []
