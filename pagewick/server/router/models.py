"""RoutedModels: the models that a server can load, by the names that requests use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from pagewick.errors import ConfigError
from pagewick.log import get_logger, one_line
from pagewick.server.api.responses import ModelCard, ModelStatus
from pagewick.server.api.served_models import LATEST, ServedModels, listed
from pagewick.server.errors import ApiError
from pagewick.server.router.entry import ModelEntry
from pagewick.server.router.loading import ModelSource, ServedModel, Together
from pagewick.server.router.pool import ModelPool, PooledModel
from pagewick.server.telemetry.metric_sums import Family, summed

Routed = PooledModel[ServedModel]

_logger = get_logger(__name__)


class RoutedModels:
    """The models of a server.

    find_entries: returns what can be loaded now; a model that has been added later is found when a request names it.
    """

    def __init__(
        self,
        pool: ModelPool[ServedModel],
        together: Together,
        find_entries: Callable[[], Sequence[ModelEntry]],
        *,
        max_loaded: int,
    ) -> None:
        self.pool = pool
        self._together = together
        self._find_entries = find_entries
        self._max_loaded = max_loaded
        self._sources: dict[str, ModelSource] = {}
        self._by_name: dict[str, Routed] = {}
        self._cards: dict[str, ServedModels] = {}

    async def refresh(self) -> None:
        """Add the models that can be loaded since the last time."""
        try:
            entries = await asyncio.to_thread(self._find_entries)
        except ConfigError as error:
            if not self._sources:
                raise
            _logger.error("the known models are served on: %s", one_line(error))
            return
        self._forget(self._sources.keys() - {entry.name for entry in entries})
        for entry in entries:
            if entry.name in self._sources:
                continue
            source = ModelSource(entry, self._together, num_places=self._max_loaded, others=self._loaded)
            self._sources[entry.name] = source
            self._cards[entry.name] = ServedModels(entry.settings)
            model = self.pool.add(
                entry.name,
                source,
                idle_s=None if entry.is_pinned else entry.settings.sleep_idle_seconds,
                is_pinned=entry.is_pinned,
            )
            for name in entry.names:
                self._by_name.setdefault(name, model)

    def _forget(self, names: Iterable[str]) -> None:
        """Remove models whose files are gone, unless they are loaded."""
        for model in [model for model in self.pool.models if model.name in names and model.state == "unloaded"]:
            self.pool.remove(model)
            del self._sources[model.name], self._cards[model.name]
            self._by_name = {name: one for name, one in self._by_name.items() if one is not model}

    @property
    def at_start(self) -> list[Routed]:
        """The models that are to be loaded before the server is ready."""
        return [self._by_name[name] for name, source in self._sources.items() if source.entry.loads_at_start]

    def entry_of(self, model: Routed) -> ModelEntry:
        return self._sources[model.name].entry

    async def find(self, name: str | None) -> Routed:
        """Return the model that a request names, also by an adapter that was loaded later. Raises ApiError."""
        if name is None:
            return self._default()
        if (found := self._known(name)) is not None:
            return found
        await self.refresh()
        if (found := self._known(name)) is None:
            message = f"the model {name[:200]!r} does not exist; this server has {self._named('and')}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return found

    async def named(self) -> list[tuple[str, Routed]]:
        """Return all models, each under all its names, those of loaded adapters included."""
        await self.refresh()
        return [(name, model) for model in self.pool.models for name in self._names_of(model)]

    async def cards(self) -> list[ModelCard]:
        """Return the descriptions of all models, and of the adapters of those that are loaded."""
        return [self._with_status(model, name) for name, model in await self.named()]

    async def card(self, name: str) -> ModelCard:
        """Return the description of a model under one of its names. Raises ApiError."""
        return self._with_status(await self.find(name), name)

    def families(self) -> list[Family]:
        """Return the metrics of all models."""
        return summed(self._sources[model.name].families(model.loaded) for model in self.pool.models)

    def _names_of(self, model: Routed) -> Iterable[str]:
        adapters: Iterable[str] = () if model.loaded is None else model.loaded.info.adapters
        served = [name for name in self._by_name if self._by_name[name] is model]
        return dict.fromkeys((*served, *adapters))

    def _known(self, name: str) -> Routed | None:
        for one in (name, name.removesuffix(LATEST)):
            if (found := self._by_name.get(one) or self._with_adapter(one)) is not None:
                return found
        return None

    def _with_status(self, model: Routed, name: str) -> ModelCard:
        card = self._cards[model.name].card(name, None if model.loaded is None else model.loaded.info)
        is_dead = model.loaded is not None and model.loaded.engine.health.state != "ready"
        card.status = ModelStatus(value=model.state, failed=is_dead or model.failure is not None)
        return card

    def _default(self) -> Routed:
        defaults = [source.entry.name for source in self._sources.values() if source.entry.is_default]
        only = defaults or (list(self._sources) if len(self._sources) == 1 else [])
        if not only:
            message = f"model is missing, and this server has several: name {self._named('or')}"
            raise ApiError(400, message, param="model", code="model_required")
        return self._by_name[only[0]]

    def _with_adapter(self, name: str) -> Routed | None:
        loaded = (model for model in self.pool.models if model.loaded is not None)
        return next((model for model in loaded if model.loaded and name in model.loaded.info.adapters), None)

    def _named(self, word: str) -> str:
        return listed(self._by_name, word) if self._by_name else "none yet"

    def _loaded(self) -> list[ServedModel]:
        return [model.loaded for model in self.pool.models if model.loaded is not None]
