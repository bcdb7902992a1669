"""ServerUrl: where an HTTP server with OpenAI's API is: a host and a port, or a Unix socket."""

from __future__ import annotations

import ssl
import urllib.parse
from dataclasses import dataclass
from typing import Any, Self

from pagewick.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServerUrl:
    """The address of a server. path: the part before /chat/completions, without a slash at its end: "/v1".

    socket_path: of a Unix socket, which is used in place of host and port.
    """

    is_encrypted: bool
    host: str
    port: int
    path: str
    socket_path: str | None = None

    @classmethod
    def parse(cls, url: str, flag: str = "--url") -> Self:
        """Parse http://host:port/v1; the path is /v1 if there is none. Or unix:PATH. Raises ConfigError.

        flag: where the URL comes from, for errors.
        """
        return cls(**url_fields(url, flag))

    def __str__(self) -> str:
        if self.socket_path is not None:
            return f"unix:{self.socket_path}"
        return f"{'https' if self.is_encrypted else 'http'}://{self.host_header}{self.path}"

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.is_encrypted else 80) else f"{host}:{self.port}"

    def tls(self) -> ssl.SSLContext | None:
        return ssl.create_default_context() if self.is_encrypted else None


def url_fields(url: str, flag: str) -> dict[str, Any]:
    """Return the fields of a ServerUrl. Raises ConfigError."""
    if url.startswith("unix:"):
        socket_path = url.removeprefix("unix:").removeprefix("//")
        if not socket_path:
            raise ConfigError(f"{url!r} names no Unix socket; write unix:PATH")
        return {"is_encrypted": False, "host": "localhost", "port": 80, "path": "/v1", "socket_path": socket_path}
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{url!r} is not a URL ({error}); write http://host:port/v1") from None
    is_whole = parts.hostname and port != 0 and not parts.query and not parts.fragment
    if parts.scheme not in ("http", "https") or not is_whole:
        raise ConfigError(f"{url!r} is not the URL of a server; write http://host:port/v1")
    if parts.username or parts.password:
        raise ConfigError("a URL must not contain a password; put the API key into an environment variable")
    # The host's name as DNS and HTTP need it, with umlauts encoded.
    try:
        host = (parts.hostname or "").encode("idna").decode("ascii")
    except UnicodeError:
        host = ""
    if not host or not host.isprintable() or " " in host:
        raise ConfigError(f"{parts.hostname!r} is not a host name; check {flag}")
    path = parts.path.rstrip("/") or "/v1"
    if not path.isascii() or not path.isprintable() or " " in path:
        quoted = urllib.parse.quote(path, safe="/%:@!$&'()*+,;=~", errors="surrogateescape")
        whole = urllib.parse.urlunsplit(parts._replace(path=quoted))
        raise ConfigError(f"the path {path!r} has characters that a URL cannot contain; write {whole}")
    is_encrypted = parts.scheme == "https"
    return {"is_encrypted": is_encrypted, "host": host, "port": port or (443 if is_encrypted else 80), "path": path}
