"""Applies the settings of a server to its engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagewick.async_llm import AsyncEngine
from pagewick.sampling_params import with_changes
from pagewick.server.remote_prefill import PrefillingClient, RemotePrefill
from pagewick.server.settings import ServerSettings
from pagewick.server_url import ServerUrl


def set_up(engine: AsyncEngine, settings: ServerSettings, sampling: Mapping[str, Any]) -> None:
    """Give requests their defaults, and prompts the server that computes them.

    sampling: fields of SamplingParams for requests that do not set them, instead of the model's defaults.
    """
    engine.default_params = with_changes(engine.default_params, sampling)
    engine.chosen_defaults = frozenset(sampling)
    if settings.prefill_url is not None:
        remote = RemotePrefill(ServerUrl.parse(settings.prefill_url), settings.prefill_api_key)
        engine.wrap_client(lambda client: PrefillingClient(client, remote, settings.prefill_min_tokens))
