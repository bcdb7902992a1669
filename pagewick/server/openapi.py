"""GET /openapi.json: the description of the API (OpenAPI 3.1), made from the routes and the message types.

Summaries and descriptions come from docstrings: a handler's, and for fields those of the struct and of SamplingParams,
where the description of a field follows its name and a colon.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterable, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from pagewick import __version__
from pagewick.engine.messages import RequestOptions
from pagewick.sampling_params import RANGES, SamplingParams
from pagewick.server.api.conversation_fields import ConversationRequest
from pagewick.server.api.operation import Operation, describes, handler_and_operation
from pagewick.server.errors import ErrorResponse

OPENAPI_PATH = "/openapi.json"

_Json = dict[str, Any]

# "name: text" or "name, name: text", at the beginning of a line or sentence.
_ENTRY = re.compile(r"(?:^|(?<=[.\n]))\s*((?:[a-z]\w*, )*[a-z]\w*): ")

_REF = "#/components/schemas/{name}"
_ABOUT = (
    "Pagewick serves language models. It speaks OpenAI's API; further fields come from vLLM and llama.cpp. "
    "In a request, null is the same as leaving a field out. Unknown fields are ignored, and the header "
    "x-pagewick-ignored names them; a server with --strict refuses them. Every GET route also answers HEAD."
)
_STREAM = (
    "With stream: true the response is a stream of server-sent events. The data of each event is one chunk, and the "
    "last is [DONE]. An error after the first event is an event, too."
)
_NAMED_STREAM = (
    "With stream: true the response is a stream of server-sent events, each with its type as its name. An error after "
    "the first event is an event, too."
)
_LINES = (
    "Unless stream is false, the response is a stream of objects, one in each line. An error after the first one is an "
    "object, too."
)
# Statuses that a request with a body may get. Every route may give those of _ALWAYS.
_WITH_BODY = (400, 408, 413, 415)
_ALWAYS = (403, 503)
_MEANINGS = {
    400: "A field is wrong, and param names it; or the request asks for something that is not supported.",
    401: "There is no API key, or a wrong one.",
    403: "The host of the request, or the web page that sends it, is not allowed.",
    404: "There is no such model, session or file.",
    408: "The body arrives too slowly.",
    409: "The session's previous request still runs.",
    413: "The body is too large.",
    415: "The content-encoding is not supported.",
    429: "Too many requests wait.",
    500: "The request failed, and would fail again.",
    503: "The model is loading, the engine is restarting, or the server is stopping.",
    504: "The request's timeout is over.",
    529: "The server cannot take requests now: see 503.",
}
# Statuses that HTTP itself does not have.
_PHRASES = {529: "Overloaded"}
_RETRIED = (429, 503, 529)
_SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def openapi_route(routes: Sequence[BaseRoute], *, open_paths: Collection[str], has_keys: bool) -> Route:
    """Return the route of the description, which includes itself. The description is made on the first request."""
    made: list[bytes] = []

    @describes(Operation(tag="Server", response="application/json"))
    async def openapi(request: Request) -> Response:
        """Return this description."""
        if not made:
            document = openapi_document([*routes, route], open_paths=open_paths, has_keys=has_keys)
            made.append(msgspec.json.encode(document))
        return Response(made[0], media_type="application/json", headers={"cache-control": "no-cache"})

    route = Route(OPENAPI_PATH, openapi, methods=["GET"])
    return route


def openapi_document(routes: Iterable[BaseRoute], *, open_paths: Collection[str], has_keys: bool) -> _Json:
    """Return the description of a server's routes. open_paths: those that need no key; has_keys: whether others do."""
    described = [(route, *handler_and_operation(route.endpoint)) for route in routes if isinstance(route, Route)]
    operations = [operation or Operation() for _, _, operation in described]
    paths: dict[str, _Json] = {}
    for (route, handler, _), operation in zip(described, operations, strict=True):
        path = re.sub(r":path}", "}", route.path)
        is_open = path in open_paths or route.path.startswith("/page/")
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = {
                **_operation(operation, handler, needs_key=has_keys and not is_open),
                "operationId": "_".join([method.lower(), *(re.findall(r"\w+", path) or ["root"])]),
                **({"security": []} if has_keys and is_open else {}),
                **_parameters(route.path),
            }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Pagewick", "version": __version__, "description": _ABOUT},
        "servers": [{"url": "/"}],
        "tags": [{"name": name} for name in dict.fromkeys(operation.tag for operation in operations)],
        **({"security": [{name: []} for name in _SECURITY]} if has_keys else {}),
        "paths": paths,
        "components": {
            "schemas": _schemas(operations),
            "responses": {_name(status): _error(status) for status in _MEANINGS},
            **({"securitySchemes": _SECURITY} if has_keys else {}),
        },
    }


def _operation(operation: Operation, handler: Any, *, needs_key: bool) -> _Json:
    summary, _, description = inspect.cleandoc(handler.__doc__ or "").partition("\n")
    statuses = {*operation.errors, *_ALWAYS, *(_WITH_BODY if operation.request else ()), *((401,) if needs_key else ())}
    made: _Json = {
        "tags": [operation.tag],
        "summary": summary.rstrip("."),
        "responses": {
            "200": _success(operation),
            **{str(status): _error_of(operation, status) for status in sorted(statuses)},
            "default": _error(kind=operation.error),
        },
    }
    if description:
        made["description"] = " ".join(description.split())
    if operation.request is not None:
        content = {"application/json": {"schema": _ref(operation.request)}}
        made["requestBody"] = {"required": True, "content": content, **_further_fields(operation)}
    return made


def _further_fields(operation: Operation) -> _Json:
    """The fields that are no part of the request's schema and yet are not unknown."""
    if operation.known is None or operation.request is None:
        return {}
    refused = sorted(operation.known.unsupported.keys() - set(operation.request.__struct_fields__))
    harmless = ", ".join(sorted(operation.known.harmless))
    return {"description": f"Refused unless empty: {', '.join(refused)}. Without effect: {harmless}."}


def _success(operation: Operation) -> _Json:
    if isinstance(operation.response, str):
        media_type = operation.response.partition(";")[0] or "*/*"
        return {"description": "Success", "content": {media_type: {}}}
    content: _Json = {"application/json": {"schema": _ref(operation.response)}}
    if operation.chunks:
        content[operation.streams] = {"schema": {"anyOf": [*map(_ref, operation.chunks), _ref(operation.error)]}}
    return {"description": _about_streams(operation) if operation.chunks else "Success", "content": content}


def _about_streams(operation: Operation) -> str:
    if operation.streams != "text/event-stream":
        return _LINES
    # Only events without names need one that ends the stream.
    return _STREAM if len(operation.chunks) == 1 else _NAMED_STREAM


def _error_of(operation: Operation, status: int) -> _Json:
    """Errors of OpenAI's form are described once for all routes."""
    if operation.error is ErrorResponse:
        return {"$ref": f"#/components/responses/{_name(status)}"}
    return _error(status, operation.error)


def _error(status: int | None = None, kind: type = ErrorResponse) -> _Json:
    body = {"application/json": {"schema": _ref(kind)}}
    made: _Json = {"description": "An error" if status is None else _MEANINGS[status], "content": body}
    if status in _RETRIED:
        about = "Seconds after which to try again."
        made["headers"] = {"retry-after": {"description": about, "schema": {"type": "integer"}}}
    return made


def _parameters(path: str) -> _Json:
    found = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        | ({"description": "It may contain slashes."} if may_have_slashes else {})
        for name, may_have_slashes in re.findall(r"{(\w+)(:path)?}", path)
    ]
    return {"parameters": found} if found else {}


def _name(status: int) -> str:
    return _PHRASES.get(status) or HTTPStatus(status).phrase.title().replace(" ", "")


def _ref(kind: type) -> _Json:
    return {"$ref": _REF.format(name=kind.__name__)}


def _schemas(operations: Iterable[Operation]) -> _Json:
    requests = {operation.request for operation in operations if operation.request is not None}
    bodies = [body for one in operations for body in (one.response, one.error, *one.chunks)]
    answers = {body for body in bodies if isinstance(body, type)}
    of_requests = _components(requests)
    of_answers = _components(answers | {ErrorResponse})
    for schema in of_answers.values():
        # Only fields whose default is UNSET may be absent from what the server sends.
        fields = schema.get("properties", {})
        required = [name for name, field in fields.items() if "default" in field or name in schema["required"]]
        schema["required"] = required
    return of_requests | of_answers


def _components(kinds: Collection[type]) -> dict[str, _Json]:
    """Return the schemas of structs, and of all structs in them, by name."""
    _, schemas = msgspec.json.schema_components(sorted(kinds, key=lambda kind: kind.__name__), ref_template=_REF)
    by_name = {kind.__name__: kind for kind in kinds}
    for name, schema in schemas.items():
        _simplify(schema)
        _describe_fields(schema, by_name.get(name))
    return schemas


def _simplify(schema: Any) -> None:
    """Remove the empty schema that stands for encoded JSON (msgspec.Raw); its union also names the real types."""
    for part in list(schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()):
        _simplify(part)
    if isinstance(schema, dict) and {} in schema.get("anyOf", ()):
        kept = [option for option in schema["anyOf"] if option]
        schema["anyOf"] = kept
        if len(kept) == 1:
            schema.update(schema.pop("anyOf")[0])


def _describe_fields(schema: _Json, kind: type | None) -> None:
    fields = schema.get("properties", {})
    intro, found = _parse(schema.pop("description", ""))
    if intro:
        schema["description"] = intro
    if kind is not None:
        bases = [base for base in kind.__mro__[1:] if base.__module__.startswith("pagewick.")]
        for other in [*bases, ConversationRequest, SamplingParams, RequestOptions]:
            found = _parse(other.__doc__ or "")[1] | found
    for name, field in fields.items():
        if name in found:
            field["description"] = found[name]
        low, high = RANGES.get(name, (None, None))
        for option in [field, *field.get("anyOf", ())]:
            if option.get("type") in ("integer", "number") and low is not None:
                option |= {"minimum": low, "maximum": high}


def _parse(docstring: str) -> tuple[str, dict[str, str]]:
    """Return a docstring's beginning, and the descriptions of the fields that it names, in the words of JSON."""
    intro, *parts = _ENTRY.split(inspect.cleandoc(docstring))
    found: dict[str, str] = {}
    for names, text in zip(parts[::2], parts[1::2], strict=True):
        found |= dict.fromkeys(names.split(", "), " ".join(text.partition("\n\n")[0].split()).replace("None", "null"))
    return " ".join(intro.split()), found
