"""Download a model from a Hugging Face hub into the standard cache, going on where a download stopped.

huggingface_hub finds, authorises and names; the bytes are fetched by `transfer`, because huggingface_hub's
own downloads begin again from the first byte after an interruption. The cache is laid out as its own
(https://huggingface.co/docs/huggingface_hub/guides/manage-cache): blobs/<etag>, snapshots/<commit>/<name>
linking to it, refs/<revision> holding the commit. So other programs use what was fetched here, and we theirs.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from huggingface_hub import HfApi, constants, get_hf_file_metadata, get_token, hf_hub_url
from huggingface_hub.errors import HFValidationError, RevisionNotFoundError
from huggingface_hub.hf_api import ModelInfo, RepoSibling
from huggingface_hub.utils import WeakFileLock, build_hf_headers  # type: ignore[attr-defined]

from pagewick.errors import ModelLoadError, ModelNotFoundError
from pagewick.log import get_logger
from pagewick.weights import files
from pagewick.weights.hub import HubSettings
from pagewick.weights.hub_errors import MAKE_ROOM, NotAHubError, explain
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

_LIST_TIMEOUT_SECONDS: Final = 10.0
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_ETAG: Final = re.compile(r"[\w.=+-]{1,200}", re.ASCII)

_logger = get_logger(__name__)


def download_model(
    settings: HubSettings, model: str, revision: str, cached: Path | None, progress: Progress | None
) -> Path:
    """The up-to-date snapshot of a model; `cached` (a complete older one) if the hub cannot be asked.

    Raises ModelNotFoundError or ModelLoadError, with the next thing to try.
    """
    token = _find_token(settings)
    try:
        api = HfApi(endpoint=settings.endpoint, token=token or False, library_name="pagewick")
        info = _ask_hub(api, model, revision)
    except (HTTP_ERROR, OSError, NotAHubError) as error:
        if cached is not None and not isinstance(error, RevisionNotFoundError):
            _logger.warning(
                "using the cached %s: %s does not answer (%s)", model, settings.endpoint, type(error).__name__
            )
            return cached
        raise explain(error, settings, model, revision, has_token=token is not None) from error
    try:
        return _Download(settings, model, revision, token, info).run(progress)
    except (HTTP_ERROR, OSError) as error:
        raise explain(error, settings, model, revision, has_token=token is not None) from error


def _find_token(settings: HubSettings) -> str | None:
    if settings.token is not None:
        return settings.token
    if settings.token_path == Path(constants.HF_TOKEN_PATH):
        return get_token()  # which also renews a login that is about to expire
    try:
        return settings.token_path.read_text().strip() or None
    except OSError:
        return None


def _ask_hub(api: HfApi, model: str, revision: str) -> ModelInfo:
    """The commit of a revision and its files, in one request."""
    try:
        info = api.model_info(model, revision=revision, files_metadata=True, timeout=_LIST_TIMEOUT_SECONDS)
    except HFValidationError as error:
        raise ModelNotFoundError(f"{model!r} is not a Hugging Face id\n  {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NotAHubError(repr(error)) from error
    if not isinstance(info.sha, str) or not _COMMIT.fullmatch(info.sha) or info.siblings is None:
        raise NotAHubError("no commit or no list of files")
    return info


def open_repository(settings: HubSettings, model: str, revision: str) -> RemoteRepository:
    """What the hub has of a model, to be read in pieces. Raises as download_model does."""
    token = _find_token(settings)

    def explained(error: BaseException) -> ModelLoadError:
        return explain(error, settings, model, revision, has_token=token is not None)

    try:
        api = HfApi(endpoint=settings.endpoint, token=token or False, library_name="pagewick")
        info = _ask_hub(api, model, revision)
    except (HTTP_ERROR, OSError, NotAHubError) as error:
        raise explained(error) from error
    assert info.sha is not None and info.siblings is not None  # _ask_hub has checked
    siblings = {sibling.rfilename: sibling for sibling in info.siblings}
    commit = info.sha
    return RemoteRepository(
        model,
        frozenset(siblings),
        lambda name: _describe(settings, model, commit, siblings[name], token),
        build_hf_headers(token=token or False, library_name="pagewick"),
        explained,
    )


def _describe(settings: HubSettings, model: str, commit: str, sibling: RepoSibling, token: str | None) -> RemoteFile:
    """Size and etag from the list of files, or, where a mirror lists only names, by asking for them."""
    url = hf_hub_url(model, sibling.rfilename, revision=commit, endpoint=settings.endpoint)
    if sibling.lfs is not None:
        etag, size = sibling.lfs.sha256, sibling.lfs.size
    elif sibling.blob_id is not None and sibling.size is not None:
        etag, size = sibling.blob_id, sibling.size
    else:
        metadata = get_hf_file_metadata(url, token=token or False, endpoint=settings.endpoint)
        if metadata.etag is None or metadata.size is None:
            raise DamagedFileError(f"{url} comes without ETag or Content-Length")
        etag, size = metadata.etag, metadata.size
    if not _ETAG.fullmatch(etag):
        raise DamagedFileError(f"{url} has the unusable ETag {etag!r}")
    return RemoteFile(sibling.rfilename, url, etag, size)


class _Download:
    """One model at one commit, on its way into the cache."""

    def __init__(self, settings: HubSettings, model: str, revision: str, token: str | None, info: ModelInfo) -> None:
        assert info.sha is not None and info.siblings is not None  # _ask_hub has checked
        self._settings, self._model, self._revision, self._token = settings, model, revision, token
        self._commit = info.sha
        # Names come from a server; whatever files.select_* picks is plain, so nothing is written elsewhere.
        self._siblings: Mapping[str, RepoSibling] = {s.rfilename: s for s in info.siblings}
        self._storage = settings.storage_dir(model)
        self._snapshot = self._storage / "snapshots" / self._commit
        self._stop = threading.Event()

    def run(self, progress: Progress | None) -> Path:
        """Fetch what is missing: small files, then weights; last the name that makes them visible."""
        names = self._siblings.keys()
        has_index = files.needs_index(names)
        if not has_index:
            files.select_weights(names, None, self._model)  # raises before anything is fetched
        if files.CONFIG_NAME not in names:
            raise ModelLoadError(f"{self._model} has no {files.CONFIG_NAME}\n  use a repository for transformers")
        wanted = [*files.select_metadata(names), *([files.INDEX_NAME] if has_index else [])]
        self._fetch_all(self._missing(wanted), lambda num_bytes: None)

        index = files.read_index(self._snapshot / files.INDEX_NAME) if has_index else None
        weights = self._missing(files.select_weights(names, index, self._model))
        if weights:
            self._fetch_weights(weights, progress or default_progress())
        self._write_ref()
        return self._snapshot

    def _missing(self, names: Iterable[str]) -> list[RemoteFile]:
        return [self._describe(name) for name in names if not (self._snapshot / name).exists()]

    def _describe(self, name: str) -> RemoteFile:
        return _describe(self._settings, self._model, self._commit, self._siblings[name], self._token)

    def _fetch_weights(self, weights: list[RemoteFile], progress: Progress) -> None:
        total_bytes = sum(file.size for file in weights)
        done_bytes = sum(min(file.size, size_of(partial_path(self._blob(file)))) for file in weights)
        check_disk(self._settings.cache_dir, self._model, total_bytes - done_bytes, MAKE_ROOM)
        progress.start(f"downloading {self._model}", total_bytes, done_bytes)
        try:
            self._fetch_all(weights, progress.advance)
        finally:
            progress.stop()

    def _fetch_all(self, wanted: Iterable[RemoteFile], advance: Callable[[int], None]) -> None:
        headers = build_hf_headers(token=self._token or False, library_name="pagewick")
        transfer = Transfer(headers, advance, self._stop)
        in_parallel(partial(self._fetch_one, transfer), wanted, self._stop)

    def _fetch_one(self, transfer: Transfer, file: RemoteFile) -> None:
        blob = self._blob(file)
        lock = self._settings.cache_dir / ".locks" / self._storage.name / f"{file.etag}.lock"
        for directory in (blob.parent, lock.parent, self._snapshot):
            directory.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):  # another process may be fetching the same file: wait, then use its result
            if not blob.exists():
                transfer.fetch(file, blob)
            else:
                transfer.advance(file.size)
            _link(blob, self._snapshot / file.name)

    def _blob(self, file: RemoteFile) -> Path:
        return self._storage / "blobs" / file.etag

    def _write_ref(self) -> None:
        """Let the revision's name point at this commit; last, so that it never names something incomplete."""
        if self._revision == self._commit:
            return
        ref = self._storage / "refs" / self._revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        temporary = ref.with_name(f"{ref.name}.{os.getpid()}-{threading.get_ident()}.tmp")
        temporary.write_text(self._commit)
        os.replace(temporary, ref)


def _link(blob: Path, pointer: Path) -> None:
    try:
        pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    except FileExistsError:
        return
    except OSError:  # a file system without symbolic links
        os.replace(blob, pointer)
