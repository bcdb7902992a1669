"""The socket on which a server listens: a TCP port, or a Unix socket, which is a file."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator

from pagewick.errors import ConfigError
from pagewick.server.settings import ServerSettings

# For this user and the group: fewer than can reach a port of the loopback address.
_SOCKET_MODE = 0o660
_BACKLOG = 2048


@contextlib.contextmanager
def listening(settings: ServerSettings) -> Iterator[socket.socket]:
    """Yield a bound socket. This comes before the model is loaded, so that a wrong address is known at once.

    The file of a Unix socket is deleted at the end. Raises ConfigError.
    """
    if settings.uds is None:
        with _tcp_socket(settings.host, settings.port) as listener:
            yield listener
        return
    with _unix_socket(settings.uds) as listener:
        made = os.lstat(settings.uds)
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                # Another server may have replaced a file that somebody has deleted.
                if os.path.samestat(os.lstat(settings.uds), made):
                    os.unlink(settings.uds)


def address_of(listener: socket.socket) -> str:
    """Return the URL of a server that listens on this socket; unix:PATH for a Unix socket."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _tcp_socket(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except UnicodeError:  # from the encoding for DNS
        raise ConfigError(
            f"cannot listen on {host}:{port} (a part of a host name has 1 to 63 characters); choose another with --host"
        ) from None
    except OSError as error:
        hint = "choose another port with --port" if error.errno == errno.EADDRINUSE else "choose another with --host"
        raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror}); {hint}") from None
    return listener


def _unix_socket(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            listener.bind(path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not _is_abandoned(path):
                raise
            os.unlink(path)
            listener.bind(path)
        # Nobody can connect before `listen`. It comes at once, or another server would take the file for abandoned.
        os.chmod(path, _SOCKET_MODE)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        # Python's own errors, about a path that is too long, have no number.
        is_taken = error.errno == errno.EADDRINUSE
        reason = "there is such a file, or another server listens there" if is_taken else error.strerror or str(error)
        raise ConfigError(f"cannot listen on the Unix socket {path} ({reason}); choose another with --uds") from None
    except BaseException:
        listener.close()
        raise
    return listener


def _is_abandoned(path: str) -> bool:
    """Return whether a file is a socket on which nobody listens, as a server that was killed leaves one."""
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        return client.connect_ex(path) == errno.ECONNREFUSED
