"""ServedModels: the names under which the one model is served."""

from __future__ import annotations

import hashlib
import time

from pagewick import __version__
from pagewick.engine.model_info import ModelInfo
from pagewick.server.api.responses import ModelCard, ModelPermission
from pagewick.server.errors import ApiError
from pagewick.server.settings import ANY_NAME, ServerSettings


class ServedModels:
    """The names of the model. Responses carry the first one, whichever a client asked for."""

    def __init__(self, settings: ServerSettings) -> None:
        self._names = [name for name in settings.served_model_name if name != ANY_NAME]
        self._takes_any = ANY_NAME in settings.served_model_name
        self._created = int(time.time())

    def check(self, name: str | None) -> None:
        """Raises ApiError (404) for a name that is not served. A request need not name the model."""
        if name is not None and name not in self._names and not self._takes_any:
            known = " and ".join(repr(one) for one in self._names)
            message = f"the model {name[:200]!r} does not exist; this server has {known}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def cards(self, info: ModelInfo) -> list[ModelCard]:
        return [self.card(name, info) for name in self._names]

    def card(self, name: str, info: ModelInfo) -> ModelCard:
        return ModelCard(
            id=name,
            created=self._created,
            root=self._names[0],
            max_model_len=info.max_model_len,
            input_modalities=["text"] if info.image_token_id is None else ["text", "image"],
            permission=[ModelPermission(id=f"modelperm-{_digest(name)}", created=self._created)],
        )


def fingerprint_of(info: ModelInfo) -> str:
    """Return OpenAI's system_fingerprint, which is the same as long as the same seed should give the same tokens."""
    model = (info.model_path, info.architecture, info.dtype, info.kv_cache_dtype, info.device, info.kernels)
    sizes = (str(info.num_parameters), str(info.tensor_parallel_size))
    return f"fp_{_digest(__version__, *model, *sizes, *info.rotations)}"


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
