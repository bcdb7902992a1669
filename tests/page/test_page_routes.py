"""The page's files over HTTP, and patterns that must not occur in them."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from pagewick.server.page_routes import CONTENT_SECURITY_POLICY, MEDIA_TYPES, PAGE_DIR, page_routes, read_page
from pagewick.server.settings import ServerSettings

# Our own files, and those of the libraries, which test_vendor.py checks.
FILES = sorted(path for folder in (PAGE_DIR, PAGE_DIR / "docs") for path in folder.iterdir() if path.is_file())
VENDORED = sorted(path for path in (PAGE_DIR / "vendor").iterdir() if path.suffix)
SCRIPTS = [path for path in FILES if path.suffix == ".js"]
MAX_OWN_BYTES = 228_000
MAX_VENDORED_BYTES = 450_000
MAX_LINES = 350
SETTINGS = ServerSettings()


def name_of(path: Path) -> str:
    return path.relative_to(PAGE_DIR).as_posix()


by_name = pytest.mark.parametrize("path", FILES, ids=name_of)


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(Starlette(routes=page_routes(SETTINGS)))


@pytest.mark.parametrize("path", [*FILES, *VENDORED], ids=name_of)
def test_every_file_is_served_with_its_media_type(client: TestClient, path: Path) -> None:
    answer = client.get(f"/page/{name_of(path)}")
    assert answer.status_code == 200
    assert answer.content == path.read_bytes()
    assert answer.headers["content-type"] == MEDIA_TYPES[path.suffix]


@pytest.mark.parametrize(
    "url", ["/", "/page/main.js", "/favicon.ico", "/page/style.css", "/docs", "/page/docs/docs.js"]
)
def test_headers(client: TestClient, url: str) -> None:
    got, headed = client.get(url), client.head(url)
    assert got.status_code == headed.status_code == 200
    assert headed.content == b""
    assert dict(got.headers) == dict(headed.headers)
    assert got.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert got.headers["x-content-type-options"] == "nosniff"
    assert got.headers["referrer-policy"] == "no-referrer"
    assert got.headers["cache-control"] == "no-cache"


def test_the_policy_allows_nothing_inline_and_nothing_from_elsewhere() -> None:
    policy = dict(part.strip().split(" ", 1) for part in CONTENT_SECURITY_POLICY.split(";"))
    assert policy == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "img-src": "'self' data: blob:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }


def test_a_client_with_the_current_version_gets_304(client: TestClient) -> None:
    etag = client.get("/page/main.js").headers["etag"]
    for known in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        answer = client.get("/page/main.js", headers={"if-none-match": known})
        assert (answer.status_code, answer.content, answer.headers["etag"]) == (304, b"", etag)
        assert answer.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    for other in ('"other"', etag.strip('"'), ""):
        assert client.get("/page/main.js", headers={"if-none-match": other}).status_code == 200


def test_files_with_different_contents_have_different_etags() -> None:
    files = read_page(SETTINGS)
    assert len({file.etag for file in files.values()}) == len(files) == len(FILES) + len(VENDORED)


@pytest.mark.parametrize(
    "url",
    [
        "/page/",
        "/page/nothing.js",
        "/page/..%2fpage_routes.py",
        "/page/%2e%2e/app.py",
        "/page/..\\app.py",
        "/page//etc/passwd",
        "/page/%2fetc%2fpasswd",
        "/page/main.js%00.css",
        "/page/MAIN.JS",
        "/page/vendor",
        "/page/vendor/",
        "/page/vendor/SHA256SUMS",
        "/page/vendor/..%2fmain.js",
        "/page/marked.js",
        "/index.html",
    ],
)
def test_nothing_else_is_served(client: TestClient, url: str) -> None:
    assert client.get(url, follow_redirects=False).status_code == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_only_get_and_head_are_allowed(client: TestClient, method: str) -> None:
    assert client.request(method, "/").status_code == 405


def test_all_files_are_shipped() -> None:
    root = PAGE_DIR.parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    assert {"server/page/*", "server/page/docs/*", "server/page/vendor/*"} <= set(
        project["tool"]["setuptools"]["package-data"]["pagewick"]
    )
    assert {path.suffix for path in [*FILES, *VENDORED]} == set(MEDIA_TYPES)
    assert "recursive-include pagewick/server/page *" in (root / "MANIFEST.in").read_text(encoding="utf-8")


def test_the_page_stays_small() -> None:
    assert sum(path.stat().st_size for path in FILES) < MAX_OWN_BYTES
    assert sum(path.stat().st_size for path in VENDORED) < MAX_VENDORED_BYTES
    for path in FILES:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES, path.name


@by_name
def test_no_file_names_another_host(path: Path) -> None:
    # A namespace is a name, not an address; "https://" alone occurs in patterns for links.
    found = set(re.findall(r"(?:https?:)?//[a-z][\w-]*\.[\w.-]+[^\s\"'`]*", path.read_text(encoding="utf-8")))
    assert found <= {"http://www.w3.org/2000/svg"}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_no_script_makes_code_or_markup_of_text(path: Path) -> None:
    code = path.read_text(encoding="utf-8")
    # html.js passes HTML to DOMPurify, which allows only a list of harmless tags and attributes.
    makes_markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|srcdoc"
    makes_code = r"\beval\b|new Function|setAttribute\(\"style\"|javascript:"
    assert re.findall(f"{makes_markup}|{makes_code}", code) == []


def test_only_one_script_parses_html() -> None:
    using = {path.name for path in SCRIPTS if "sanitize(" in path.read_text(encoding="utf-8")}
    assert using == {"html.js"}


def test_the_markup_has_nothing_inline() -> None:
    markup = "".join((PAGE_DIR / name).read_text(encoding="utf-8") for name in ("index.html", "docs/index.html"))
    assert re.findall(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)|javascript:", markup) == []


def test_the_markup_fetches_every_module_at_once() -> None:
    markup = (PAGE_DIR / "index.html").read_text(encoding="utf-8")
    preloaded = set(re.findall(r'<link rel="modulepreload" href="page/([\w./-]+)">', markup))
    assert preloaded == {name_of(path) for path in [*SCRIPTS, *VENDORED] if path.suffix == ".js"} - {
        "main.js",
        "theme.js",
        "docs/docs.js",
    }


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, pagewick.server.page_routes; "
        "print(sorted({'torch', 'numpy', 'transformers', 'jinja2'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.strip() == "[]"
