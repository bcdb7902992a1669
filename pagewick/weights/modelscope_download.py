"""Models on ModelScope, and how they get into its cache: checked by SHA-256, and renamed once they are right.

The HTTP API is that of the modelscope package: /api/v1/models/<id>/repo/files lists Path, Size and Sha256 of every file
of a Revision, /api/v1/models/<id>/repo sends one FilePath; errors are {"Success": false, "Message": ...}.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from huggingface_hub import get_session
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

from pagewick import __version__
from pagewick.errors import ModelLoadError, ModelNotFoundError
from pagewick.log import get_logger
from pagewick.weights import files
from pagewick.weights.download import Download
from pagewick.weights.hub_settings import CacheState, ModelScopeSettings, is_sha256
from pagewick.weights.module_files import may_be_of_module
from pagewick.weights.progress import Progress
from pagewick.weights.remote import RESUMES, RemoteRepository, UnexpectedResponseError, is_forbidden
from pagewick.weights.transfer import RemoteFile, Transfer

PARTS_NAME: Final = ".pagewick-parts"

_LOCK_NAME: Final = "lock"
_LIST_TIMEOUT_SECONDS: Final = 30.0
_MAX_MESSAGE: Final = 120

_logger = get_logger(__name__)


class ModelScopeRepository(RemoteRepository):
    """A revision of a model; of its subdirectories, only GGUF files and modules. Raises as RemoteRepository does."""

    settings: ModelScopeSettings

    @property
    def headers(self) -> dict[str, str]:
        headers, token = {"User-Agent": f"pagewick/{__version__}"}, self.settings.token
        if token is not None:
            # Old parts of the API know the token as a session, new ones as a bearer. Neither follows a redirect to
            # another site.
            headers |= {"Authorization": f"Bearer {token}", "Cookie": f"m_session_id={token}"}
        return headers

    def list_names(self) -> Collection[str]:
        query = urlencode({"Revision": self.revision, "Recursive": "true"})
        url = f"{self._base}/repo/files?{query}"
        response = get_session().get(url, headers=self.headers, timeout=_LIST_TIMEOUT_SECONDS)
        try:
            content = response.json()
        except ValueError:
            content = None
        if not isinstance(content, dict) or "Success" not in content:
            raise UnexpectedResponseError(response.status_code, "not the answer of a ModelScope hub")
        if response.status_code != 200 or content["Success"] is not True:
            raise UnexpectedResponseError(response.status_code, str(content.get("Message") or "")[:_MAX_MESSAGE])
        data = content.get("Data")
        listed = data.get("Files") if isinstance(data, dict) else None
        if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
            raise UnexpectedResponseError(response.status_code, "an answer without a list of files")
        for entry in listed:
            name = str(entry.get("Path"))
            is_wanted = files.is_plain_name(name) or name.endswith(files.GGUF_SUFFIX) or may_be_of_module(name)
            if entry.get("Type") != "tree" and is_wanted:
                self._files[name] = self._remote_file(entry)
        return self._files.keys()

    def describe(self, name: str) -> RemoteFile:
        return self._files[name]

    def download(self, progress: Progress | None, only: Sequence[str] = ()) -> Path:
        return _Download(self, self.settings.model_dir(self.model, self.revision), only).run(progress)

    def explain_response(self, error: UnexpectedResponseError | HfHubHTTPError) -> ModelLoadError:
        status = error.status if isinstance(error, UnexpectedResponseError) else error.response.status_code
        endpoint, model, token = self.settings.endpoint, self.model, self.settings.token
        message = str(error).partition("\n")[0]
        said = f" ({message})" if message else ""
        if status in (401, 403):
            fix = "check MODELSCOPE_API_TOKEN and what it may read" if token else "set MODELSCOPE_API_TOKEN"
            return ModelLoadError(f"{endpoint} refuses {model}: HTTP {status}{said}\n  if it is private: {fix}")
        if status == 404:
            is_default = self.revision == self.settings.default_revision
            what = f"model {model}" if is_default else f"model {model}, or no revision {self.revision!r} of it"
            private = "the token has no access" if token else "set MODELSCOPE_API_TOKEN"
            return ModelNotFoundError(
                f"{endpoint} has no {what}\n  check the spelling; if it is private: {private}\n"
                "  a model of Hugging Face is found with --hub huggingface"
            )
        if status == 200:
            return ModelLoadError(
                f"{endpoint} does not answer as a ModelScope hub{said}\n  check {model} and MODELSCOPE_ENDPOINT"
            )
        fix = "wait some minutes" if status == 429 else "wait; if MODELSCOPE_ENDPOINT is set, check it"
        return ModelLoadError(f"{endpoint} refused {model}: HTTP {status}{said}\n  {fix}, then {RESUMES}")

    @property
    def _base(self) -> str:
        return f"{self.settings.endpoint}/api/v1/models/{self.model}"

    def _remote_file(self, entry: Mapping[str, Any]) -> RemoteFile:
        name, size, digest = str(entry["Path"]), entry.get("Size"), entry.get("Sha256")
        if not isinstance(size, int) or size < 0 or not is_sha256(digest):
            raise UnexpectedResponseError(200, f"{name[:_MAX_MESSAGE]} is listed without Size or Sha256")
        url = f"{self._base}/repo?{urlencode({'Revision': self.revision, 'FilePath': name})}"
        return RemoteFile(name, url, str(digest), size)


class _Download(Download[ModelScopeRepository]):
    """Nobody else may download the same revision at the same time."""

    def __init__(self, repository: ModelScopeRepository, directory: Path, only: Sequence[str]) -> None:
        super().__init__(repository, directory, only)
        self._parts = directory / PARTS_NAME
        # Single files say nothing about the checkpoint beside them.
        self._state = CacheState(is_complete=bool(only), files={})
        self._hindrance: OSError | None = None

    @contextmanager
    def _lock(self) -> Iterator[None]:
        with ExitStack() as stack:
            try:
                self._parts.mkdir(parents=True, exist_ok=True)
                stack.enter_context(WeakFileLock(self._parts / _LOCK_NAME))
            except OSError as error:
                if not is_forbidden(error):
                    raise
                self._hindrance = error  # a complete model can be read without a lock
            self._state = CacheState.read(self._directory) or self._state
            yield

    def _record(self) -> None:
        """Write the notes, before files are changed and after. Raises OSError where there is no lock."""
        if self._hindrance is not None:
            raise self._hindrance
        self._state.write(self._directory)

    def _missing(self, names: Iterable[str]) -> list[RemoteFile]:
        """Also note that the directory, or one of the single files, is incomplete if any file is missing."""
        missing = [file for file in map(self._repository.file, names) if not self._is_right(file)]
        if missing:
            self._state.is_complete &= bool(self._only)
            for file in missing:
                self._state.files.pop(file.name, None)
            self._record()
        return missing

    def _is_right(self, file: RemoteFile) -> bool:
        path = self._directory / file.name
        if not path.is_file() or path.stat().st_size != file.size:
            return False
        if file.name not in self._state.files:  # another program may have put it there
            _logger.info("checking %s", path)
            with path.open("rb") as stream:
                self._state.files[file.name] = hashlib.file_digest(stream, "sha256").hexdigest()
        return self._state.files[file.name] == file.etag

    def _destination(self, file: RemoteFile) -> Path:
        """Name the file by its hash too, so that a part of another version is not taken for its beginning."""
        return self._parts / f"{file.etag}-{Path(file.name).name}"

    def _fetch_one(self, transfer: Transfer, file: RemoteFile) -> None:
        part = self._destination(file)
        transfer.fetch(file, part)
        place = self._directory / file.name
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(part, place)
        self._state.files[file.name] = file.etag

    def _finish(self) -> None:
        if self._only and self._state != CacheState.read(self._directory):
            self._record()
        if self._only or self._state.is_complete:
            return
        self._state.is_complete = True
        self._record()
        for part in self._parts.iterdir():  # parts of files that have changed since they arrived
            if part.name != _LOCK_NAME:
                part.unlink()
