"""AdaptersApi: loads and unloads LoRA adapters while the server runs, by vLLM's routes."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pagewick.errors import InvalidRequestError, ModelLoadError
from pagewick.server.api.dialect import Dialect
from pagewick.server.api.json_response import json_response
from pagewick.server.api.known_fields import OPENAI_FIELDS
from pagewick.server.api.openai import OPENAI_EVENTS
from pagewick.server.api.operation import Operation, describes
from pagewick.server.api.responses import ModelCard
from pagewick.server.errors import ApiError

_CHANGING = Operation(tag="LoRA adapters", known=OPENAI_FIELDS, errors=(404,))
# Long enough for every path.
_MAX_TEXT = 4096


class LoadAdapterRequest(Struct, kw_only=True):
    """lora_name: under which requests name the adapter as their model. lora_path: a directory, a file, an id on a hub.

    load_inplace: whether to replace an adapter of this name, if there is one.
    """

    lora_name: str
    lora_path: str
    load_inplace: bool = False

    def __post_init__(self) -> None:
        for name in ("lora_name", "lora_path"):
            _check_text(name, getattr(self, name))


class UnloadAdapterRequest(Struct, kw_only=True):
    """lora_name: the adapter's name. lora_int_id: vLLM's number of it, which changes nothing."""

    lora_name: str
    lora_int_id: int | None = None

    def __post_init__(self) -> None:
        _check_text("lora_name", self.lora_name)


class AdapterUnloaded(Struct, kw_only=True):
    id: str
    object: str = "model"
    deleted: bool = True


class AdaptersApi(Dialect):
    """The handlers; there are none unless the settings allow them, since they read paths that a client names."""

    framing = OPENAI_EVENTS
    known_fields = OPENAI_FIELDS

    def routes(self) -> list[Route]:
        if not self.settings.allow_runtime_lora_updating:
            return []
        return [
            Route("/v1/load_lora_adapter", self.load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self.unload, methods=["POST"]),
        ]

    @describes(replace(_CHANGING, request=LoadAdapterRequest, response=ModelCard))
    async def load(self, request: Request) -> Response:
        """Load a LoRA adapter, which requests then name as their model."""
        body, ignored = await self.read(request, LoadAdapterRequest, needs_engine=False)
        engine = self.core.engine
        if body.lora_name in self.settings.served_model_name:
            message = f"lora_name is {body.lora_name!r}, which is a name of the model; give another one"
            raise InvalidRequestError(message, param="lora_name")
        try:
            await engine.load_adapter(body.lora_name, body.lora_path, replaces=body.load_inplace)
        except InvalidRequestError as error:
            error.param = "lora_name"
            raise
        except ModelLoadError as error:
            # The client has named the path, so that the error may name it, too.
            raise ApiError(400, str(error), param="lora_path", code="invalid_adapter") from error
        return json_response(self.models.card(body.lora_name, engine.info), ignored)

    @describes(replace(_CHANGING, request=UnloadAdapterRequest, response=AdapterUnloaded))
    async def unload(self, request: Request) -> Response:
        """Unload a LoRA adapter. Requests that use it go on."""
        body, ignored = await self.read(request, UnloadAdapterRequest, needs_engine=False)
        if body.lora_name not in self.core.engine.info.adapters:
            message = f"there is no adapter {body.lora_name[:200]!r}"
            raise ApiError(404, message, param="lora_name", code="model_not_found")
        await self.core.engine.unload_adapter(body.lora_name)
        return json_response(AdapterUnloaded(id=body.lora_name), ignored)


def _check_text(name: str, value: str) -> None:
    if not 0 < len(value) <= _MAX_TEXT or "\0" in value:
        raise InvalidRequestError(f"{name} must be a text of 1 to {_MAX_TEXT} characters", param=name)
