"""Hugging Face's hub: its settings, and its cache on this disk. Imports neither torch nor huggingface_hub.

The environment is read at every call, in the way that huggingface_hub reads it once at import. Layout of the cache
(https://huggingface.co/docs/huggingface_hub/guides/manage-cache): blobs/<etag>, snapshots/<commit>/<name> linking to
it, refs/<revision> holding the commit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from pagewick.weights.hub_settings import HubSettings, expand_path, is_commit, is_offline

STORAGE_PREFIX: Final = "models--"

_DEFAULT_ENDPOINT: Final = "https://huggingface.co"


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceSettings(HubSettings):
    """The settings of huggingface_hub. token_path: file with the token of a login."""

    default_revision: ClassVar[str] = "main"
    cache_variable: ClassVar[str] = "HF_HOME"
    endpoint_variable: ClassVar[str] = "HF_ENDPOINT"

    token_path: Path

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], token: str | None = None) -> HuggingFaceSettings:
        """Read HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_TOKEN_PATH, HF_ENDPOINT, HF_HUB_OFFLINE and their older names."""
        cache_home = expand_path(environment.get("XDG_CACHE_HOME") or "~/.cache")
        home = expand_path(environment.get("HF_HOME") or str(cache_home / "huggingface"))
        cache_dir = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE")
        token = token or environment.get("HF_TOKEN") or environment.get("HUGGING_FACE_HUB_TOKEN") or ""
        return cls(
            endpoint=(environment.get("HF_ENDPOINT") or _DEFAULT_ENDPOINT).rstrip("/"),
            cache_dir=expand_path(cache_dir or str(home / "hub")),
            token_path=expand_path(environment.get("HF_TOKEN_PATH") or str(home / "token")),
            token=token.strip() or None,
            offline=is_offline(environment),
        )

    def storage_dir(self, model: str) -> Path:
        """Return the directory of the cache that holds one model's blobs/, refs/ and snapshots/."""
        return self.cache_dir / f"{STORAGE_PREFIX}{model.replace('/', '--')}"

    def cached_directory(self, model: str, revision: str) -> Path | None:
        """Return the snapshot of a revision, complete or not; None if there is none."""
        storage = self.storage_dir(model)
        commit = revision
        if not is_commit(revision):
            ref = storage / "refs" / revision
            commit = ref.read_text().strip() if ref.is_file() else ""
        snapshot = storage / "snapshots" / commit
        return snapshot if is_commit(commit) and snapshot.is_dir() else None
