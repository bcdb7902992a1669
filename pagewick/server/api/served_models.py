"""ServedModels: the names under which the one model is served, and those of its LoRA adapters."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable

from pagewick import __version__
from pagewick.engine.model_info import ModelInfo
from pagewick.server.api.responses import ModelCard, ModelPermission
from pagewick.server.errors import ApiError
from pagewick.server.settings import ANY_NAME, ServerSettings

# Names that an error lists.
_MAX_NAMED = 10
# Ollama's suffix of a name without a tag. Its clients add it.
LATEST = ":latest"


def listed(names: Iterable[str], word: str) -> str:
    """Return the first names in words: 'a', 'b' and 'c'. word: stands before the last one."""
    shown = [repr(name) for name in names]
    if len(shown) > _MAX_NAMED:
        shown[_MAX_NAMED:] = [f"{len(shown) - _MAX_NAMED} more"]
    *others, last = shown
    return f"{', '.join(others)} {word} {last}" if others else last


class ServedModels:
    """The names of the model and of its adapters.

    Responses carry the model's first name, whichever a client asked for, or that of the adapter.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._names = [name for name in settings.served_model_name if name != ANY_NAME]
        self._takes_any = ANY_NAME in settings.served_model_name
        self._created = int(time.time())

    def check(self, name: str | None, info: ModelInfo) -> None:
        """Raises ApiError (404) for a name that is not served. A request need not name the model."""
        if name is None or self._takes_any or self._known(name, info) is not None:
            return
        known = listed((*self._names, *info.adapters), "and")
        message = f"the model {name[:200]!r} does not exist; this server has {known}"
        raise ApiError(404, message, param="model", code="model_not_found")

    def adapter(self, name: str | None, info: ModelInfo) -> str:
        """Return the adapter that a request asks for by its model's name; empty: none."""
        known = None if name is None else self._known(name, info)
        return known if known is not None and known not in self._names else ""

    def shown(self, name: str | None, info: ModelInfo) -> str:
        """Return the model's name in the response to a request that asked for `name`."""
        return self.adapter(name, info) or self._names[0]

    def _known(self, name: str, info: ModelInfo) -> str | None:
        """Return the name of the model or of an adapter that a request means; None if it means neither."""
        known = (*self._names, *info.adapters)
        return next((one for one in (name, name.removesuffix(LATEST)) if one in known), None)

    def cards(self, info: ModelInfo) -> list[ModelCard]:
        return [self.card(name, info) for name in dict.fromkeys((*self._names, *info.adapters))]

    def card(self, name: str, info: ModelInfo | None) -> ModelCard:
        """Return the description of a model or of an adapter. info: None: the model is not loaded."""
        adapter = self.adapter(name, info) if info is not None else ""
        return ModelCard(
            id=name,
            created=self._created,
            root=adapter or self._names[0],
            parent=self._names[0] if adapter else None,
            max_model_len=None if info is None else info.max_model_len,
            input_modalities=None if info is None else ["text", *(["image"] * (info.image_token_id is not None))],
            permission=[ModelPermission(id=f"modelperm-{_digest(name)}", created=self._created)],
        )


def fingerprint_of(info: ModelInfo) -> str:
    """Return OpenAI's system_fingerprint, which is the same as long as the same seed should give the same tokens."""
    model = (info.model_path, info.default_adapter, info.architecture, info.dtype, info.kv_cache_dtype)
    machine = (info.device, info.kernels)
    sizes = (str(info.num_parameters), str(info.tensor_parallel_size))
    return f"fp_{_digest(__version__, *model, *machine, *sizes, *info.rotations)}"


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
