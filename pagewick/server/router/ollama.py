"""The routes of Ollama's API that are about models, for a server with several."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pagewick.server.api.decoding import decode_request
from pagewick.server.api.json_response import json_response
from pagewick.server.api.ollama.catalog import NEVER, ModelFiles, described, listed, running
from pagewick.server.api.ollama.dialect import OLLAMA, pulled
from pagewick.server.api.ollama.fields import OLLAMA_FIELDS, ModelRequest
from pagewick.server.api.ollama.responses import ModelDescription, ModelTags, PullStatus, RunningModels, timestamp
from pagewick.server.api.operation import describes
from pagewick.server.guard.body import read_body
from pagewick.server.router.models import Routed, RoutedModels
from pagewick.server.settings import ServerSettings

# A longer time is no date.
MAX_IDLE_S = 1e9
_ABOUT_MODELS = replace(OLLAMA, errors=(404,))


class OllamaModels:
    """None of these routes loads a model: clients describe every model of the list before they use one."""

    def __init__(self, models: RoutedModels, settings: ServerSettings) -> None:
        self._models = models
        self._settings = settings

    def routes(self) -> list[Route]:
        return [
            Route("/api/tags", self.tags, methods=["GET"]),
            Route("/api/ps", self.ps, methods=["GET"]),
            Route("/api/show", self.show, methods=["POST"]),
            Route("/api/pull", self.pull, methods=["POST"]),
        ]

    @describes(replace(OLLAMA, response=ModelTags))
    async def tags(self, request: Request) -> Response:
        """List all models, loaded or not, under each of their names."""
        named = await self._models.named()
        files = await self._files([model for _, model in named])
        infos = {model.name: None if model.loaded is None else model.loaded.info for _, model in named}
        entries = [listed(name, files[model.name], infos[model.name]) for name, model in named]
        return json_response(ModelTags(entries))

    @describes(replace(OLLAMA, response=RunningModels))
    async def ps(self, request: Request) -> Response:
        """List the models that are loaded."""
        loaded = [(model, model.loaded.info) for model in self._models.pool.models if model.loaded is not None]
        files = await self._files([model for model, _ in loaded])
        entries = [running(model.name, files[model.name], info, _expires_at(model)) for model, info in loaded]
        return json_response(RunningModels(entries))

    @describes(replace(_ABOUT_MODELS, request=ModelRequest, response=ModelDescription))
    async def show(self, request: Request) -> Response:
        """Describe a model; its capabilities are known only while it is loaded."""
        model, _, ignored = await self._read(request)
        files = await self._files([model])
        engine = None if model.loaded is None else model.loaded.engine
        return json_response(described(files[model.name], engine), ignored)

    @describes(replace(_ABOUT_MODELS, request=ModelRequest, response=PullStatus, chunk=PullStatus))
    async def pull(self, request: Request) -> Response:
        """Succeed if there is the model; this server downloads only what it was started with."""
        _, body, ignored = await self._read(request)
        return pulled(body, ignored)

    async def _read(self, request: Request) -> tuple[Routed, ModelRequest, list[str]]:
        raw = await read_body(request, self._settings)
        body, ignored = decode_request(raw, ModelRequest, strict=self._settings.strict, known=OLLAMA_FIELDS)
        return await self._models.find(body.model or body.name), body, ignored

    async def _files(self, models: Sequence[Routed]) -> dict[str, ModelFiles]:
        """Return the files of models, by name: those of a loaded model, or else those that its name stands for."""
        paths = {}
        for model in models:
            configured = self._models.entry_of(model).config.model
            paths[model.name] = configured if model.loaded is None else model.loaded.info.model_path
        return await asyncio.to_thread(lambda: {name: ModelFiles.of(Path(path)) for name, path in paths.items()})


def _expires_at(model: Routed) -> str:
    """Return when a loaded model is unloaded if no further request comes; NEVER if it stays."""
    if model.idle_s is None:
        return NEVER
    unused_s = 0.0 if model.num_in_flight else time.monotonic() - model.used_at
    left = timedelta(seconds=min(MAX_IDLE_S, max(0.0, model.idle_s - unused_s)))
    return timestamp(datetime.now(UTC) + left)
