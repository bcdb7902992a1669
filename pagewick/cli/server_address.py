"""ServerAddress: an OpenAI-compatible server for `chat --url` and `bench --url`, and the meaning of its errors."""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pagewick.cli.terminal_text import harmless
from pagewick.errors import (
    ConfigError,
    ContextLengthError,
    EngineError,
    InvalidRequestError,
    PagewickError,
    QueueFullError,
)
from pagewick.server_url import ServerUrl, url_fields

API_KEY_VARIABLES = ("PAGEWICK_API_KEY", "OPENAI_API_KEY")
# The limit of a single read: a long prompt takes a while until its first token.
TIMEOUT_S = 600.0
MAX_ERROR_CHARS = 500


@dataclass(frozen=True, slots=True)
class ServerAddress(ServerUrl):
    """The address of a server, and the key that it wants."""

    api_key: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> ServerAddress:
        """Parse what ServerUrl.parse does. Raises ConfigError."""
        return cls(**url_fields(url, "--url"), api_key=api_key)

    @property
    def headers(self) -> dict[str, str]:
        """The headers of every request."""
        authorization = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"content-type": "application/json", "accept": "text/event-stream, application/json", **authorization}

    def connect(self) -> http.client.HTTPConnection:
        """Return a connection, which is opened by its first request."""
        if self.socket_path is not None:
            return _UnixConnection(self.socket_path)
        if self.is_encrypted:
            return http.client.HTTPSConnection(self.host, self.port, timeout=TIMEOUT_S, context=self.tls())
        return http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT_S)

    def unreachable(self, error: Exception) -> ConfigError:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return ConfigError(f"cannot connect to {self}: {reason}; check that the server runs, and --url")

    def model_names(self) -> list[str]:
        """Return the names that GET /models lists, at least one. Raises ConfigError, or an error of `error_of`."""
        connection = self.connect()
        try:
            connection.request("GET", f"{self.path}/models", headers=self.headers)
            response = connection.getresponse()
            body = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self.unreachable(error) from None
        finally:
            connection.close()
        if response.status != 200:
            raise error_of(response.status, body)
        try:
            names = [str(card["id"]) for card in json.loads(body)["data"]]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ConfigError(f"{self}/models is not that of an OpenAI-compatible server; check --url") from None
        if not names:
            raise ConfigError(f"{self} serves no model; start it with one")
        return names


class _UnixConnection(http.client.HTTPConnection):
    """A connection to a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def api_key_from(name: str | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the key in the variable `name`, or in the first of API_KEY_VARIABLES that is set.

    Raises ConfigError if the named variable is not set, or a key has characters that cannot be sent.
    """
    if name is not None and not environment.get(name):
        raise ConfigError(f"--api-key-env names {name}, which is not set; export {name}=... first")
    key = next((environment[one] for one in ([name] if name else API_KEY_VARIABLES) if environment.get(one)), None)
    if key is not None and not (key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(f"the API key in {name or ' or '.join(API_KEY_VARIABLES)} has characters that no API key has")
    return key


def error_of(status: int, body: bytes) -> PagewickError:
    """Return the exception for an HTTP error whose body has OpenAI's format or is any text."""
    message, code = error_parts(body)
    message = f"the server says: {message or 'HTTP ' + str(status)}"
    if code == "context_length_exceeded":
        return ContextLengthError(message)
    if status in (401, 403):
        hint = f"put its API key into {API_KEY_VARIABLES[0]}, or name another variable with --api-key-env"
        return ConfigError(f"{message}\n{hint}")
    if status == 404:
        return ConfigError(f"{message}\ncheck --url and --model")
    if status == 429:
        return QueueFullError(message)
    return InvalidRequestError(message) if 400 <= status < 500 else EngineError(message)


def error_parts(body: bytes) -> tuple[str, str | None]:
    """Return message and code of an error's body; the message is short, and has no control characters."""
    text = body.decode("utf-8", "replace").strip()
    code = None
    try:
        content: Any = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if isinstance(content, Mapping):
        error = content.get("error", content)
        if isinstance(error, Mapping):
            text = str(error.get("message") or text)
            code = error.get("code") if isinstance(error.get("code"), str) else None
        elif isinstance(error, str):
            text = error
    # Pagewick ends a message with the code for programs that look for it there.
    text = text.removesuffix(f" ({code})")
    return harmless(text[:MAX_ERROR_CHARS]), code
