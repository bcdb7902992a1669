"""Environment variables that switch kernels off: PAGEWICK_NATIVE and PAGEWICK_TRITON."""

import os
from collections.abc import Mapping

from pagewick.errors import ConfigError

_OFF = ("0", "false", "no", "off")
_ON = ("", "1", "true", "yes", "on")


def is_switched_on(name: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the variable is unset, or says yes. Raises ConfigError for a value that is neither yes nor no."""
    value = environ.get(name, "").strip().lower()
    if value in _ON or value in _OFF:
        return value in _ON
    raise ConfigError(f"{name} is {environ[name]!r}; set it to 0 or 1, or unset it")
