"""Shortens the time for which idle threads of torch's OpenMP runtime spin; see docs/decisions/0007-short-spins.md.

Imports nothing but the standard library: the runtime reads its variables once, when torch is imported.
"""

from __future__ import annotations

import os
import sys
from typing import Final

from pagewick.log import get_logger

VARIABLES: Final = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
# Whether torch was imported before this module, in a program that has set none of the variables.
_IS_TOO_LATE: Final = "torch" in sys.modules and not os.environ.keys() & VARIABLES

logger = get_logger(__name__)


def limit_spinning() -> None:
    """Set the variables for this process and its children, unless the user has."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def warn_if_too_late(num_threads: int) -> None:
    """Log a warning if idle ones of torch's num_threads threads will spin."""
    if _IS_TOO_LATE and num_threads > 1 and sys.platform == "linux":
        logger.warning(
            "torch was imported before pagewick, so torch's idle threads keep processors busy that the engine needs: "
            "import pagewick first, or set OMP_WAIT_POLICY=PASSIVE"
        )
