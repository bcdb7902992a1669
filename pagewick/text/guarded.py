"""Calls of the tokenizers library with data that comes from strangers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pagewick.errors import ModelLoadError

_Made = TypeVar("_Made")


def guarded(make: Callable[[], _Made], source: Path | str) -> _Made:
    """Return what `make` returns. Raises ModelLoadError, which names `source`, for any failure within it."""
    try:
        return make()
    except (KeyboardInterrupt, SystemExit, ModelLoadError):
        raise
    # The library raises a bare Exception for a bad file and a BaseException where its Rust code panics.
    except BaseException as error:
        if (shown := str(source).encode(errors="replace").decode()) != str(source):
            raise ModelLoadError(f"the path {shown} is not UTF-8, which tokenizers need; rename it") from None
        reason = str(error)[:200]
        raise ModelLoadError(f"{source} is not a usable tokenizer ({reason}); download the model again") from None
