"""Room for the connections that the settings allow: each is an open file, and many systems allow only 1024 at first."""

from __future__ import annotations

import resource

from pagewick.log import get_logger
from pagewick.server.guard.connections import MAX_FAREWELLS
from pagewick.server.settings import ServerSettings

# Files other than connections: the model's tokenizer, the log, the engine's socket, and some to spare.
OTHER_FILES = 256

_logger = get_logger(__name__)


def allow_open_files(settings: ServerSettings) -> None:
    """Raise this process' own limit as far as needed and allowed. Logs a warning if that is too little."""
    needed = settings.max_connections + MAX_FAREWELLS + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        fitting = max(1, allowed - MAX_FAREWELLS - OTHER_FILES)
        message = "the system allows %d open files, too few for %d connections; ulimit -n %d, or --max-connections %d"
        _logger.warning(message, allowed, settings.max_connections, needed, fitting)
