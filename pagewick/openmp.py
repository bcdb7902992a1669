"""Shortens the time for which idle threads of torch's OpenMP runtime spin; see docs/decisions/0007-short-spins.md.

Threads that spin keep those that they wait for off the processors. Imports only the standard library: the runtime reads
its variables once, when torch is imported, and every module of Pagewick is imported after this one.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Final

VARIABLES: Final = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
# Whether torch was imported before this module, in a program that has set none of the variables.
_IS_TOO_LATE: Final = "torch" in sys.modules and not os.environ.keys() & VARIABLES


def limit_spinning() -> None:
    """Set GOMP_SPINCOUNT for this process and its children, unless the user has set it or OMP_WAIT_POLICY."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def warn_if_too_late(num_threads: int) -> None:
    """Log a warning if the idle threads of torch, which uses num_threads, spin for as long as is usual."""
    if _IS_TOO_LATE and num_threads > 1 and sys.platform == "linux":
        logging.getLogger(__name__).warning(
            "torch was imported before pagewick, so torch's idle threads keep processors busy that the engine needs: "
            "import pagewick first, or set OMP_WAIT_POLICY=PASSIVE"
        )
