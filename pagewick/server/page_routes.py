"""The chat page at `/` and the page about the API at `/docs`: static files, all from this server."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import MappingProxyType

from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pagewick.server.api.operation import Operation, describes
from pagewick.server.settings import ServerSettings

PAGE_DIR = Path(__file__).parent / "page"
# The pages, by path, and the file that each has beside its own files.
CHAT_PAGE = ("/", "index.html")
DOCS_PAGE = ("/docs", "docs/index.html")
ICON = ("/favicon.ico", "icon.svg")
SHARED_FILES = ("icon.svg", "theme.js")
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

_PAGES = Operation(tag="Pages", errors=(404,))


class PageFile(Struct, frozen=True):
    body: bytes
    media_type: str
    etag: str


def read_page(settings: ServerSettings) -> dict[str, PageFile]:
    """Return the files of the pages that are served, by their path below `PAGE_DIR`, such as `vendor/marked.js`."""
    files = {}
    for name in _file_names(settings):
        path = PAGE_DIR / name
        body = path.read_bytes()
        files[name] = PageFile(body, MEDIA_TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')
    return files


def page_paths(settings: ServerSettings) -> frozenset[str]:
    """Return the paths that `page_routes` serves, which need no API key."""
    return frozenset([path for path, _ in _places(settings)] + [f"/page/{name}" for name in _file_names(settings)])


def page_routes(settings: ServerSettings) -> list[Route]:
    """Return the routes for GET and HEAD of the pages, of `/page/{name of a shipped file}` and of `/favicon.ico`.

    The files are read once. A request's path is looked up among their names; it never becomes a path on disk.
    Raises FileNotFoundError or KeyError if the package lacks them.
    """
    files = read_page(settings)
    by_path = {path: files[name] for path, name in _places(settings)}

    @describes(_PAGES)
    async def show_page(request: Request) -> Response:
        """Return a page for browsers, or its icon."""
        return _response(request, by_path[request.scope["path"]])

    @describes(_PAGES)
    async def show_file(request: Request) -> Response:
        """Return a file of a page."""
        file = files.get(request.path_params["file"])
        if file is None:
            raise HTTPException(404, "the chat page has no such file")
        return _response(request, file)

    routes = [Route(path, show_page, methods=["GET"]) for path in by_path]
    return [*routes, Route("/page/{file:path}", show_file, methods=["GET"])] if routes else []


def _places(settings: ServerSettings) -> list[tuple[str, str]]:
    pages = [*([CHAT_PAGE] if settings.ui else []), *([DOCS_PAGE] if settings.docs else [])]
    return [*pages, ICON] if pages else []


def _file_names(settings: ServerSettings) -> list[str]:
    files = sorted(path for path in PAGE_DIR.rglob("*") if path.suffix in MEDIA_TYPES)
    names = [path.relative_to(PAGE_DIR).as_posix() for path in files]
    shown = {True: settings.docs, False: settings.ui}
    is_shared = settings.docs or settings.ui
    return [name for name in names if shown[name.startswith("docs/")] or (is_shared and name in SHARED_FILES)]


def _response(request: Request, file: PageFile) -> Response:
    headers = {**HEADERS, "etag": file.etag}
    if _is_known(request.headers.get("if-none-match", ""), file.etag):
        return Response(status_code=304, headers=headers)
    return Response(file.body, headers=headers, media_type=file.media_type)


def _is_known(if_none_match: str, etag: str) -> bool:
    """Whether the client has this version (RFC 9110, 13.1.2). Proxies that compress make tags weak."""
    tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return etag in tags or tags == ["*"]
