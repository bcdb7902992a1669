"""What went wrong on the way to a hub, in words that say what to do next."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Final

from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from pagewick.config import BUILTIN_MODEL
from pagewick.errors import ModelLoadError, ModelNotFoundError
from pagewick.weights.hub import HubSettings
from pagewick.weights.transfer import DamagedFileError

MAKE_ROOM: Final = "free some space, or set HF_HOME to a directory on a larger disk"
_RESUMES: Final = "start again: the download goes on where it stopped"
_DISK_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class NotAHubError(Exception):
    """The answer is not one that a hub gives."""


def explain(
    error: BaseException, settings: HubSettings, model: str, revision: str, *, has_token: bool
) -> ModelLoadError:
    """Our error for one of huggingface_hub's, its HTTP client's or the system's."""
    endpoint = settings.endpoint
    if isinstance(error, GatedRepoError):
        return _explain_gated(endpoint, model, has_token=has_token)
    if isinstance(error, RevisionNotFoundError):
        return ModelNotFoundError(f"{model} has no revision {revision!r}\n  see {endpoint}/{model}/tree/main")
    if isinstance(error, RepositoryNotFoundError):
        private = "the token has no access" if has_token else "set HF_TOKEN, or run: hf auth login"
        return ModelNotFoundError(
            f"{endpoint} has no model {model}\n  check the spelling; if it is private: {private}\n"
            f"  if it is meant to be a directory: there is no {Path(model).absolute()}"
        )
    if isinstance(error, HfHubHTTPError):
        return _explain_status(error, endpoint, model)
    if isinstance(error, DamagedFileError):
        return ModelLoadError(f"{error}\n  start again to fetch it once more")
    if isinstance(error, NotAHubError):
        return ModelLoadError(f"{endpoint} does not answer as a Hugging Face hub ({error})\n  check HF_ENDPOINT")
    if isinstance(error, OSError) and not isinstance(error, ConnectionError | TimeoutError):
        if error.errno in _DISK_FULL:
            return ModelLoadError(f"the disk of {settings.cache_dir} is full\n  {MAKE_ROOM}, then {_RESUMES}")
        return ModelLoadError(
            f"cannot use the cache {settings.cache_dir}: {error}\n  set HF_HOME to a directory that you may write to"
        )
    return ModelLoadError(
        f"cannot reach {endpoint}: {error or type(error).__name__}\n"
        f"  check the network, HTTPS_PROXY and HF_ENDPOINT, then {_RESUMES}\n"
        f"  without a network: the built-in {BUILTIN_MODEL}, or a directory"
    )


def _explain_gated(endpoint: str, model: str, *, has_token: bool) -> ModelLoadError:
    if has_token:
        return ModelLoadError(
            f"{model} is gated, and the account of your token has no access\n"
            f"  ask for it at {endpoint}/{model}; check that HF_TOKEN may read gated repositories"
        )
    return ModelLoadError(
        f"{model} is gated: its authors want you to accept their terms\n"
        f"  accept them at {endpoint}/{model}, make a token at {endpoint}/settings/tokens,\n"
        "  then set HF_TOKEN to it, or run: hf auth login"
    )


def _explain_status(error: HfHubHTTPError, endpoint: str, model: str) -> ModelLoadError:
    status = error.response.status_code
    if status in (401, 403):
        fix = "check HF_TOKEN (unset it for public models)"
    elif status == 429:
        fix = f"wait some minutes, then {_RESUMES}"
    else:
        fix = f"wait and {_RESUMES}; if HF_ENDPOINT is set, check it"
    reason = f" ({error.server_message})" if error.server_message else ""
    return ModelLoadError(f"{endpoint} refused {model}: HTTP {status}{reason}\n  {fix}")
