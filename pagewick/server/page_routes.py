"""The chat page at `/`: static files, all from this server."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import MappingProxyType

from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

PAGE_DIR = Path(__file__).parent / "page"
INDEX = "index.html"
ICON = "icon.svg"
INDEX_PATH = "/"
ICON_PATH = "/favicon.ico"
MEDIA_TYPES = MappingProxyType(
    {
        ".css": "text/css; charset=utf-8",
        ".html": "text/html; charset=utf-8",
        ".js": "text/javascript; charset=utf-8",
        ".svg": "image/svg+xml",
        ".txt": "text/plain; charset=utf-8",
    }
)
# Nothing inline, nothing from other servers, no frame around the page: a model's text cannot become part of it.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = MappingProxyType(
    {
        "content-security-policy": CONTENT_SECURITY_POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        # The browser asks each time and is told 304: after an update nobody runs half of the old page.
        "cache-control": "no-cache",
    }
)


class PageFile(Struct, frozen=True):
    body: bytes
    media_type: str
    etag: str


def read_page() -> dict[str, PageFile]:
    """Return the page's files by their path below `PAGE_DIR`, such as `main.js` and `vendor/marked.js`."""
    files = {}
    for name in _file_names():
        path = PAGE_DIR / name
        body = path.read_bytes()
        files[name] = PageFile(body, MEDIA_TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')
    return files


def page_paths() -> frozenset[str]:
    """Return the paths that `page_routes` serves, which need no API key."""
    return frozenset({INDEX_PATH, ICON_PATH, *(f"/page/{name}" for name in _file_names())})


def page_routes() -> list[Route]:
    """Return the routes for GET and HEAD of `/`, `/page/{name of a shipped file}` and `/favicon.ico`.

    The files are read once. A request's path is looked up among their names; it never becomes a path on disk.
    Raises FileNotFoundError or KeyError if the package lacks them.
    """
    files = read_page()
    index, favicon = files[INDEX], files[ICON]

    async def show_index(request: Request) -> Response:
        return _response(request, index)

    async def show_favicon(request: Request) -> Response:
        return _response(request, favicon)

    async def show_file(request: Request) -> Response:
        file = files.get(request.path_params["file"])
        if file is None:
            raise HTTPException(404, "the chat page has no such file")
        return _response(request, file)

    return [
        Route(INDEX_PATH, show_index, methods=["GET"]),
        Route("/page/{file:path}", show_file, methods=["GET"]),
        Route(ICON_PATH, show_favicon, methods=["GET"]),
    ]


def _file_names() -> list[str]:
    files = sorted(path for path in PAGE_DIR.rglob("*") if path.suffix in MEDIA_TYPES)
    return [path.relative_to(PAGE_DIR).as_posix() for path in files]


def _response(request: Request, file: PageFile) -> Response:
    headers = {**HEADERS, "etag": file.etag}
    if _is_known(request.headers.get("if-none-match", ""), file.etag):
        return Response(status_code=304, headers=headers)
    return Response(file.body, headers=headers, media_type=file.media_type)


def _is_known(if_none_match: str, etag: str) -> bool:
    """Whether the client has this version (RFC 9110, 13.1.2). Proxies that compress make tags weak."""
    tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return etag in tags or tags == ["*"]
