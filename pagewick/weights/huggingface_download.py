"""Models on a Hugging Face hub, and how they get into the standard cache (its layout: see hub_settings.py).

huggingface_hub finds, authorises and names; the bytes are fetched by `transfer`, because huggingface_hub's
own downloads begin again from the first byte after an interruption. Other programs can use what was fetched here, and
Pagewick uses what they fetched.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Final

from huggingface_hub import HfApi, constants, get_hf_file_metadata, get_token, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import WeakFileLock, build_hf_headers  # type: ignore[attr-defined]

from pagewick.errors import ModelLoadError, ModelNotFoundError
from pagewick.weights.download import Download
from pagewick.weights.hub_settings import HuggingFaceSettings, is_commit
from pagewick.weights.progress import Progress
from pagewick.weights.remote import RESUMES, RemoteRepository, UnexpectedResponseError
from pagewick.weights.transfer import DamagedFileError, RemoteFile, Transfer

_LIST_TIMEOUT_SECONDS: Final = 10.0
_ETAG: Final = re.compile(r"[\w.=+-]{1,200}", re.ASCII)


class HuggingFaceRepository(RemoteRepository):
    """A model at the commit that its revision names. Raises as RemoteRepository does."""

    settings: HuggingFaceSettings

    def __init__(self, settings: HuggingFaceSettings, model: str, revision: str) -> None:
        self._token = _find_token(settings)
        self._siblings: dict[str, RepoSibling] = {}
        self.commit = ""
        super().__init__(settings, model, revision)

    @property
    def headers(self) -> dict[str, str]:
        return build_hf_headers(token=self._token or False, library_name="pagewick")

    def list_names(self) -> Collection[str]:
        api = HfApi(endpoint=self.settings.endpoint, token=self._token or False, library_name="pagewick")
        try:
            info = api.model_info(
                self.model, revision=self.revision, files_metadata=True, timeout=_LIST_TIMEOUT_SECONDS
            )
        except HFValidationError as error:
            raise ModelNotFoundError(f"{self.model!r} is not a Hugging Face id\n  {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnexpectedResponseError(200, repr(error)) from error
        if not isinstance(info.sha, str) or not is_commit(info.sha) or info.siblings is None:
            raise UnexpectedResponseError(200, "no commit or no list of files")
        self.commit = info.sha
        self._siblings = {sibling.rfilename: sibling for sibling in info.siblings}
        return self._siblings.keys()

    def describe(self, name: str) -> RemoteFile:
        """Take size and etag from the list of files, or, where a mirror lists only names, ask for them."""
        sibling, endpoint = self._siblings[name], self.settings.endpoint
        url = hf_hub_url(self.model, name, revision=self.commit, endpoint=endpoint)
        etag: str | None
        size: int | None
        if sibling.lfs is not None:
            etag, size = sibling.lfs.sha256, sibling.lfs.size
        elif sibling.blob_id is not None and sibling.size is not None:
            etag, size = sibling.blob_id, sibling.size
        else:
            metadata = get_hf_file_metadata(url, token=self._token or False, endpoint=endpoint)
            etag, size = metadata.etag, metadata.size
        if etag is None or size is None:
            raise DamagedFileError(f"{url} comes without ETag or Content-Length")
        if not _ETAG.fullmatch(etag):
            raise DamagedFileError(f"{url} has the unusable ETag {etag!r}")
        return RemoteFile(name, url, etag, size)

    def download(self, progress: Progress | None, only: Sequence[str] = ()) -> Path:
        snapshot = self.settings.storage_dir(self.model) / "snapshots" / self.commit
        return _Download(self, snapshot, only).run(progress)

    def explain_response(self, error: UnexpectedResponseError | HfHubHTTPError) -> ModelLoadError:
        endpoint, model = self.settings.endpoint, self.model
        if isinstance(error, UnexpectedResponseError):
            return ModelLoadError(f"{endpoint} does not answer as a Hugging Face hub ({error})\n  check HF_ENDPOINT")
        if isinstance(error, GatedRepoError) and self._token:
            return ModelLoadError(
                f"{model} is gated, and the account of your token has no access\n"
                f"  ask for it at {endpoint}/{model}; check that HF_TOKEN may read gated repositories"
            )
        if isinstance(error, GatedRepoError):
            return ModelLoadError(
                f"{model} is gated: its authors want you to accept their terms\n"
                f"  accept them at {endpoint}/{model}, make a token at {endpoint}/settings/tokens,\n"
                "  then set HF_TOKEN to it, or run: hf auth login"
            )
        if isinstance(error, RevisionNotFoundError):
            return ModelNotFoundError(f"{model} has no revision {self.revision!r}\n  see {endpoint}/{model}/tree/main")
        if isinstance(error, RepositoryNotFoundError):
            private = "the token has no access" if self._token else "set HF_TOKEN, or run: hf auth login"
            return ModelNotFoundError(
                f"{endpoint} has no model {model}\n  check the spelling; if it is private: {private}\n"
                f"  if it is meant to be a directory: there is no {Path(model).absolute()}"
            )
        status = error.response.status_code
        if status in (401, 403):
            fix = "check HF_TOKEN (unset it for public models)"
        elif status == 429:
            fix = f"wait some minutes, then {RESUMES}"
        else:
            fix = f"wait and {RESUMES}; if HF_ENDPOINT is set, check it"
        reason = f" ({error.server_message})" if error.server_message else ""
        return ModelLoadError(f"{endpoint} refused {model}: HTTP {status}{reason}\n  {fix}")


def _find_token(settings: HuggingFaceSettings) -> str | None:
    if settings.token is not None:
        return settings.token
    if settings.token_path == Path(constants.HF_TOKEN_PATH):
        return get_token()  # which also renews a login that is about to expire
    try:
        return settings.token_path.read_text().strip() or None
    except OSError:
        return None


class _Download(Download[HuggingFaceRepository]):
    def __init__(self, repository: HuggingFaceRepository, snapshot: Path, only: Sequence[str]) -> None:
        super().__init__(repository, snapshot, only)
        self._storage = repository.settings.storage_dir(repository.model)

    def _missing(self, names: Iterable[str]) -> list[RemoteFile]:
        return [self._repository.file(name) for name in names if not (self._directory / name).exists()]

    def _destination(self, file: RemoteFile) -> Path:
        return self._storage / "blobs" / file.etag

    def _fetch_one(self, transfer: Transfer, file: RemoteFile) -> None:
        blob = self._destination(file)
        lock = self._storage.parent / ".locks" / self._storage.name / f"{file.etag}.lock"
        pointer = self._directory / file.name
        for directory in (blob.parent, lock.parent, pointer.parent):
            directory.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):  # another process may be fetching the same file: wait, then use its result
            if not blob.exists():
                transfer.fetch(file, blob)
            else:
                transfer.advance(file.size)
            try:
                pointer.symlink_to(os.path.relpath(blob, pointer.parent))
            except FileExistsError:
                return
            except OSError:  # a file system without symbolic links
                os.replace(blob, pointer)

    def _finish(self) -> None:
        """Let the revision's name point at the commit; last, so that it never names something incomplete."""
        revision, commit = self._repository.revision, self._repository.commit
        if revision == commit:
            return
        ref = self._storage / "refs" / revision
        if ref.is_file() and ref.read_text().strip() == commit:  # a complete model may be in a cache that is read-only
            return
        ref.parent.mkdir(parents=True, exist_ok=True)
        temporary = ref.with_name(f"{ref.name}.{os.getpid()}-{threading.get_ident()}.tmp")
        temporary.write_text(commit)
        os.replace(temporary, ref)
