"""Download a model from ModelScope into its cache: resumed where it stopped, checked by SHA-256, renamed when right.

The HTTP API is that of the modelscope package: /api/v1/models/<id>/repo/files lists Path, Size and Sha256 of every file
of a Revision, /api/v1/models/<id>/repo sends one FilePath; errors are {"Success": false, "Message": ...}.
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from huggingface_hub import get_session
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

from pagewick import __version__
from pagewick.config import BUILTIN_MODEL
from pagewick.errors import ModelLoadError, ModelNotFoundError
from pagewick.log import get_logger
from pagewick.weights import files
from pagewick.weights.modelscope import DEFAULT_REVISION, CacheState, ModelScopeSettings, is_sha256
from pagewick.weights.progress import Progress, default_progress
from pagewick.weights.remote import RemoteRepository
from pagewick.weights.transfer import (
    HTTP_ERROR,
    DamagedFileError,
    RemoteFile,
    Transfer,
    check_disk,
    in_parallel,
    partial_path,
    size_of,
)

PARTS_NAME: Final = ".pagewick-parts"

_LOCK_NAME: Final = "lock"
_LIST_TIMEOUT_SECONDS: Final = 30.0
_CHUNK_BYTES: Final = 2**20
_MAX_MESSAGE: Final = 120
_MAKE_ROOM: Final = "free some space, or set MODELSCOPE_CACHE to a directory on a larger disk"
_RESUMES: Final = "start again: the download goes on where it stopped"
_DISK_FULL: Final = (errno.ENOSPC, errno.EDQUOT)

_logger = get_logger(__name__)


class _RefusedError(Exception):
    """The hub answered, and not with what was asked for. status: of HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def download_model(
    settings: ModelScopeSettings, model: str, revision: str, cached: Path | None, progress: Progress | None
) -> Path:
    """The up-to-date directory of a model; `cached` (complete, maybe older) if the hub cannot be asked.

    Raises ModelNotFoundError or ModelLoadError, with the next thing to try.
    """
    try:
        listed = _list_files(settings, model, revision)
    except (HTTP_ERROR, OSError, _RefusedError) as error:
        if cached is not None:
            _logger.warning(
                "using the cached %s: %s does not answer (%s)", model, settings.endpoint, type(error).__name__
            )
            return cached
        raise _explain(error, settings, model, revision) from error
    try:
        return _Download(settings, model, revision, listed).run(progress)
    except (HTTP_ERROR, OSError) as error:
        raise _explain(error, settings, model, revision) from error


def open_repository(settings: ModelScopeSettings, model: str, revision: str) -> RemoteRepository:
    """What the hub has of a model, to be read in pieces. Raises as download_model does."""
    try:
        listed = _list_files(settings, model, revision)
    except (HTTP_ERROR, OSError, _RefusedError) as error:
        raise _explain(error, settings, model, revision) from error
    return RemoteRepository(
        model,
        frozenset(listed),
        lambda name: listed[name],
        _headers(settings),
        lambda error: _explain(error, settings, model, revision),
    )


def _headers(settings: ModelScopeSettings) -> dict[str, str]:
    headers = {"User-Agent": f"pagewick/{__version__}"}
    if settings.token is not None:
        # Old parts of the API know the token as a session, new ones as a bearer. Neither follows a redirect elsewhere.
        headers |= {"Authorization": f"Bearer {settings.token}", "Cookie": f"m_session_id={settings.token}"}
    return headers


def _list_files(settings: ModelScopeSettings, model: str, revision: str) -> dict[str, RemoteFile]:
    """Name -> file, of a revision's files that lie in no subdirectory."""
    base = f"{settings.endpoint}/api/v1/models/{model}"
    query = urlencode({"Revision": revision, "Recursive": "true"})
    response = get_session().get(
        f"{base}/repo/files?{query}", headers=_headers(settings), timeout=_LIST_TIMEOUT_SECONDS
    )
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if not isinstance(answer, dict) or "Success" not in answer:
        raise _RefusedError(response.status_code, "not the answer of a ModelScope hub")
    if response.status_code != 200 or answer["Success"] is not True:
        raise _RefusedError(response.status_code, str(answer.get("Message") or "")[:_MAX_MESSAGE])
    data = answer.get("Data")
    listed = data.get("Files") if isinstance(data, dict) else None
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise _RefusedError(response.status_code, "an answer without a list of files")
    plain = [entry for entry in listed if entry.get("Type") != "tree" and files.is_plain_name(str(entry.get("Path")))]
    return {entry["Path"]: _remote_file(base, revision, entry) for entry in plain}


def _remote_file(base: str, revision: str, entry: Mapping[str, Any]) -> RemoteFile:
    name, size, digest = str(entry["Path"]), entry.get("Size"), entry.get("Sha256")
    if not isinstance(size, int) or size < 0 or not is_sha256(digest):
        raise _RefusedError(200, f"{name[:_MAX_MESSAGE]} is listed without Size or Sha256")
    url = f"{base}/repo?{urlencode({'Revision': revision, 'FilePath': name})}"
    return RemoteFile(name, url, str(digest), size)


class _Download:
    """One revision of a model on its way into its directory."""

    def __init__(
        self, settings: ModelScopeSettings, model: str, revision: str, listed: Mapping[str, RemoteFile]
    ) -> None:
        self._settings, self._model, self._listed = settings, model, listed
        self._directory = settings.model_dir(model, revision)
        self._parts = self._directory / PARTS_NAME
        self._state = CacheState(is_complete=False, files={})
        self._stop = threading.Event()

    def run(self, progress: Progress | None) -> Path:
        """Fetch what is missing or old: small files, then weights. Nobody else may do so at the same time."""
        names = self._listed.keys()
        has_index = files.needs_index(names)
        if not has_index:
            files.select_weights(names, None, self._model)  # raises before anything is fetched
        if files.CONFIG_NAME not in names:
            raise ModelLoadError(f"{self._model} has no {files.CONFIG_NAME}\n  use a repository for transformers")
        wanted = [*files.select_metadata(names), *([files.INDEX_NAME] if has_index else [])]
        self._parts.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(self._parts / _LOCK_NAME):
            self._state = CacheState.read(self._directory) or self._state
            self._fetch_all(self._missing(wanted), lambda num_bytes: None)
            index = files.read_index(self._directory / files.INDEX_NAME) if has_index else None
            weights = self._missing(files.select_weights(names, index, self._model))
            if weights:
                self._fetch_weights(weights, progress or default_progress())
            if not self._state.is_complete:
                self._state.is_complete = True
                self._state.write(self._directory)
                self._drop_old_parts()
        return self._directory

    def _missing(self, names: Iterable[str]) -> list[RemoteFile]:
        """The files that are not here as the hub has them; from now on the directory is incomplete if there are any."""
        missing = [self._listed[name] for name in names if not self._is_right(self._listed[name])]
        if missing:
            self._state.is_complete = False
            for file in missing:
                self._state.files.pop(file.name, None)
            self._state.write(self._directory)
        return missing

    def _is_right(self, file: RemoteFile) -> bool:
        path = self._directory / file.name
        if not path.is_file() or path.stat().st_size != file.size:
            return False
        if file.name not in self._state.files:  # another program may have brought it
            _logger.info("checking %s", path)
            self._state.files[file.name] = _sha256(path)
        return self._state.files[file.name] == file.etag

    def _fetch_weights(self, weights: list[RemoteFile], progress: Progress) -> None:
        total_bytes = sum(file.size for file in weights)
        done_bytes = sum(min(file.size, size_of(partial_path(self._part(file)))) for file in weights)
        check_disk(self._settings.cache_dir, self._model, total_bytes - done_bytes, _MAKE_ROOM)
        progress.start(f"downloading {self._model}", total_bytes, done_bytes)
        try:
            self._fetch_all(weights, progress.advance)
        finally:
            progress.stop()

    def _fetch_all(self, wanted: list[RemoteFile], advance: Callable[[int], None]) -> None:
        transfer = Transfer(_headers(self._settings), advance, self._stop)
        in_parallel(partial(self._fetch_one, transfer), wanted, self._stop)
        if wanted:
            self._state.files |= {file.name: file.etag for file in wanted}
            self._state.write(self._directory)

    def _fetch_one(self, transfer: Transfer, file: RemoteFile) -> None:
        part = self._part(file)
        transfer.fetch(file, part)
        os.replace(part, self._directory / file.name)

    def _drop_old_parts(self) -> None:
        """Forget what has arrived of files that have changed since."""
        for part in self._parts.iterdir():
            if part.name != _LOCK_NAME:
                part.unlink()

    def _part(self, file: RemoteFile) -> Path:
        """Where a file arrives: named by its hash too, so that no other version is taken for its beginning."""
        return self._parts / f"{file.etag}-{file.name}"


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _explain(error: BaseException, settings: ModelScopeSettings, model: str, revision: str) -> ModelLoadError:
    """Our error for one of the hub's, the HTTP client's or the system's."""
    endpoint = settings.endpoint
    if isinstance(error, _RefusedError | HfHubHTTPError):
        status = error.status if isinstance(error, _RefusedError) else error.response.status_code
        return _explain_status(status, str(error).partition("\n")[0], settings, model, revision)
    if isinstance(error, DamagedFileError):
        return ModelLoadError(f"{error}\n  start again to fetch it once more")
    if isinstance(error, OSError) and not isinstance(error, ConnectionError | TimeoutError):
        if error.errno in _DISK_FULL:
            return ModelLoadError(f"the disk of {settings.cache_dir} is full\n  {_MAKE_ROOM}, then {_RESUMES}")
        return ModelLoadError(
            f"cannot use the cache {settings.cache_dir}: {error}\n"
            "  set MODELSCOPE_CACHE to a directory that you may write to"
        )
    return ModelLoadError(
        f"cannot reach {endpoint}: {error or type(error).__name__}\n"
        f"  check the network, HTTPS_PROXY and MODELSCOPE_ENDPOINT, then {_RESUMES}\n"
        f"  without a network: the built-in {BUILTIN_MODEL}, or a directory"
    )


def _explain_status(
    status: int, message: str, settings: ModelScopeSettings, model: str, revision: str
) -> ModelLoadError:
    said = f" ({message})" if message else ""
    has_token = settings.token is not None
    if status in (401, 403):
        fix = "check MODELSCOPE_API_TOKEN and what it may read" if has_token else "set MODELSCOPE_API_TOKEN"
        return ModelLoadError(f"{settings.endpoint} refuses {model}: HTTP {status}{said}\n  if it is private: {fix}")
    if status == 404:
        what = f"model {model}" if revision == DEFAULT_REVISION else f"model {model}, or no revision {revision!r} of it"
        private = "the token has no access" if has_token else "set MODELSCOPE_API_TOKEN"
        return ModelNotFoundError(
            f"{settings.endpoint} has no {what}\n  check the spelling; if it is private: {private}\n"
            "  a model of Hugging Face is found with --hub huggingface"
        )
    if status == 200:
        return ModelLoadError(
            f"{settings.endpoint} does not answer as a ModelScope hub{said}\n  check {model} and MODELSCOPE_ENDPOINT"
        )
    fix = "wait some minutes" if status == 429 else "wait; if MODELSCOPE_ENDPOINT is set, check it"
    return ModelLoadError(f"{settings.endpoint} refused {model}: HTTP {status}{said}\n  {fix}, then {_RESUMES}")
