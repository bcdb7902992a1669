"""The chat page at `/`: a few static files, from this server and no other."""

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
    }
)
# Nothing inline, nothing from elsewhere, in nobody's frame: what a model writes cannot become part of the page.
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


def read_page(directory: Path = PAGE_DIR) -> dict[str, PageFile]:
    """The page's files by name: those with a known ending that lie in the directory itself."""
    return {path.name: _page_file(path.read_bytes(), MEDIA_TYPES[path.suffix]) for path in _files_in(directory)}


def page_paths() -> frozenset[str]:
    """The paths that `page_routes` answers. Nothing below them is anybody's."""
    return frozenset({INDEX_PATH, ICON_PATH, *(f"/page/{path.name}" for path in _files_in(PAGE_DIR))})


def page_routes() -> list[Route]:
    """GET and HEAD of `/`, of `/page/` with the name of a shipped file, and of `/favicon.ico`.

    The files are read once; what a client asks for is looked up among them and never becomes a path. Raises
    FileNotFoundError, or KeyError, if the package lacks them.
    """
    files = read_page()
    index, favicon = files[INDEX], files[ICON]

    async def show_index(request: Request) -> Response:
        return _answer(request, index)

    async def show_favicon(request: Request) -> Response:
        return _answer(request, favicon)

    async def show_file(request: Request) -> Response:
        file = files.get(request.path_params["file"])
        if file is None:
            raise HTTPException(404, "the chat page has no such file")
        return _answer(request, file)

    return [
        Route(INDEX_PATH, show_index, methods=["GET"]),
        Route("/page/{file}", show_file, methods=["GET"]),
        Route(ICON_PATH, show_favicon, methods=["GET"]),
    ]


def _files_in(directory: Path) -> list[Path]:
    return [path for path in sorted(directory.iterdir()) if path.suffix in MEDIA_TYPES]


def _page_file(body: bytes, media_type: str) -> PageFile:
    return PageFile(body, media_type, f'"{hashlib.sha256(body).hexdigest()[:32]}"')


def _answer(request: Request, file: PageFile) -> Response:
    headers = {**HEADERS, "etag": file.etag}
    if _is_known(request.headers.get("if-none-match", ""), file.etag):
        return Response(status_code=304, headers=headers)
    return Response(file.body, headers=headers, media_type=file.media_type)


def _is_known(if_none_match: str, etag: str) -> bool:
    """Whether the client has this version (RFC 9110, 13.1.2); proxies that compress make tags weak."""
    tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return etag in tags or tags == ["*"]
