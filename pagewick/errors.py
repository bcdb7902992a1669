"""The exceptions that Pagewick raises on purpose.

PagewickError
├── ConfigError                 a flag, a parameter or an environment variable is wrong
│   └── NotEnoughMemoryError    ... or asks for more memory than is free
├── ArgumentError               an argument in Python has a wrong name or type; also a TypeError
├── ModelLoadError              the model's files are unusable
│   └── ModelNotFoundError      ... or are not there
├── InvalidRequestError         a request is wrong (HTTP 400)
│   ├── ContextLengthError      ... because it can never fit
│   └── UnsupportedError        ... because it asks for something Pagewick does not do yet
└── EngineError                 the engine failed this request (HTTP 500)
    ├── QueueFullError          ... because the queue is full (HTTP 429)
    ├── DeadlineExceededError   ... because its deadline has passed (HTTP 504)
    └── EngineDeadError         ... because the engine process has died (HTTP 503)

A message names the cause and the fix. A failed `assert` is a bug of ours, never a user's mistake.
"""

from __future__ import annotations


class PagewickError(Exception):
    """Base class of every exception that Pagewick raises on purpose."""


class ConfigError(PagewickError):
    """A flag, a parameter or an environment variable is wrong."""


class NotEnoughMemoryError(ConfigError):
    """The model, with what the flags ask for, needs more memory than is free."""


class ArgumentError(PagewickError, TypeError):
    """An argument in Python has a wrong name or type."""


class ModelLoadError(PagewickError):
    """The model's files are unusable."""


class ModelNotFoundError(ModelLoadError):
    """The model's files are not there."""


class InvalidRequestError(PagewickError):
    """A request is wrong; `param` names the field, `code` is a stable word for programs."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthError(InvalidRequestError):
    """A request that can never fit into the model's context or the KV cache."""

    def __init__(self, message: str, *, param: str | None = "messages") -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class UnsupportedError(InvalidRequestError):
    """A request for something that Pagewick does not do yet."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="unsupported_parameter")


class EngineError(PagewickError):
    """The engine failed this request; others continue."""


class QueueFullError(EngineError):
    """The queue is full. retry_after_s: seconds after which to retry."""

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceededError(EngineError):
    """The request's timeout_s passed before it was finished."""


class EngineDeadError(EngineError):
    """The engine process has died or hangs. retry_after_s: seconds after which to retry."""

    def __init__(self, message: str, *, retry_after_s: int = 5) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
