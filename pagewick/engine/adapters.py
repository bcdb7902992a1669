"""LoRA adapters of an engine: their names, numbers and places in the prefix cache. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from pagewick.engine.admission import MAX_POSITION
from pagewick.engine.batch import AdapterLoad, StepOutput, StepPlan
from pagewick.engine.messages import EngineRequest
from pagewick.errors import InvalidRequestError, ModelLoadError
from pagewick.log import get_logger

logger = get_logger(__name__)

# Engines with --enable-lora have room for at least this number of adapters.
DEFAULT_MAX_LORAS: Final = 4
DEFAULT_MAX_RANK: Final = 16
_FIRST_LOOK: Final = 1024

Run = Callable[[StepPlan], StepOutput]


@dataclass(frozen=True, slots=True)
class _Loaded:
    """number: see LoraLayer. digest: of the adapter's contents. path: where it came from."""

    number: int
    digest: bytes
    path: str


class Adapters:
    """The adapters of an engine, on rank 0.

    max_adapters: the number of adapters for which the layers have room. run: runs a plan on all ranks. is_unfinished:
    whether a request, by its id, is unfinished; the factors of its adapter then stay.
    """

    def __init__(self, max_adapters: int, run: Run, is_unfinished: Callable[[str], bool]) -> None:
        self._max_adapters = max_adapters
        self._run = run
        self._is_unfinished = is_unfinished
        self._loaded: dict[str, _Loaded] = {}
        # The adapters of requests that were unfinished when this was last looked through, and of later ones.
        self._number_of: dict[str, int] = {}
        self._look_through_at = _FIRST_LOOK

    @property
    def paths(self) -> Mapping[str, str]:
        """Where the loaded adapters come from, by name, in the order of loading."""
        return {name: loaded.path for name, loaded in self._loaded.items() if name}

    def load(self, name: str, path: str, *, replaces: bool = False) -> None:
        """Load an adapter on all ranks, under a new name; requests without an adapter get the one without a name.

        path: a directory or a file. replaces: whether the name may be that of an adapter, which requests that have it
        keep, and which stays if the other cannot be loaded.

        Raises InvalidRequestError if the name is taken or there is no room, ModelLoadError if the adapter cannot be
        used.
        """
        if not self._max_adapters:
            raise InvalidRequestError("LoRA adapters need --enable-lora", param="lora_name")
        if name in self._loaded and not replaces:
            raise InvalidRequestError(f"the adapter {name!r} is loaded already; unload it first", param="lora_name")
        self._forget_finished()
        taken = {loaded.number for loaded in self._loaded.values()} | set(self._number_of.values())
        free = [number for number in range(self._max_adapters) if number not in taken]
        if not free:
            raise InvalidRequestError(
                f"there is room for {self._max_adapters} adapters, and all of it is used: unload one, or raise "
                "--max-loras",
                param="lora_name",
            )
        output = self._run(StepPlan(adapter=AdapterLoad(free[0], path, name)))
        if output.adapter_error:
            raise ModelLoadError(output.adapter_error)
        self._loaded[name] = _Loaded(free[0], output.adapter_digest, path)
        logger.info("loaded the LoRA adapter %s from %s", name, path)

    def unload(self, name: str) -> None:
        """Forget an adapter: no new request may name it. Requests that use it go on. Raises InvalidRequestError."""
        self._find(name)
        del self._loaded[name]
        logger.info("unloaded the LoRA adapter %s", name)

    def assign(self, request: EngineRequest) -> EngineRequest:
        """Return a request with the number of its adapter, if it has one, and with its key for the prefix cache.

        Keys and values of all its tokens depend on the adapter. check_request has found the one it names.
        """
        loaded = self._loaded.get(request.adapter)
        if loaded is None:
            return request
        if len(self._number_of) >= self._look_through_at:
            self._forget_finished()
        self._number_of[request.request_id] = loaded.number
        keys = [*request.extra_keys, (0, MAX_POSITION, loaded.digest)]
        return msgspec.structs.replace(request, adapter_number=loaded.number, extra_keys=keys)

    def _forget_finished(self) -> None:
        self._number_of = {one: number for one, number in self._number_of.items() if self._is_unfinished(one)}
        # At most half of the entries are looked at in vain for each that is added.
        self._look_through_at = max(_FIRST_LOOK, 2 * len(self._number_of))

    def _find(self, name: str) -> _Loaded:
        if (found := self._loaded.get(name)) is None:
            known = ", ".join(self.paths) or "none"
            raise InvalidRequestError(f"there is no adapter {name!r}; loaded: {known}", param="model")
        return found


def num_adapters_of(max_loras: int | None, paths: Mapping[str, str]) -> int:
    """Return the number of adapters for which layers need room. max_loras: as the user chose."""
    return max_loras or max(DEFAULT_MAX_LORAS, len(paths))


def read_room(max_loras: int | None, max_rank: int | None, paths: Mapping[str, str]) -> tuple[int, int]:
    """Return the number of adapters and the rank for which layers need room.

    max_loras, max_rank: as the user chose; None: what the adapters at `paths` need, or the defaults if that is more.
    Raises ModelLoadError for an adapter that cannot be read.
    """
    from pagewick.weights.lora.reading import adapter_rank

    if max_rank is None:
        max_rank = max([DEFAULT_MAX_RANK, *(adapter_rank(Path(path)) for path in paths.values())])
    return num_adapters_of(max_loras, paths), max_rank
