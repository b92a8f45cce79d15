"""Between our exceptions and the `error` message, both ways, so that a fault keeps its type across the bus."""

from __future__ import annotations

from .errors import (
    Broken,
    Closed,
    ConfigError,
    DeadlineExceeded,
    Overloaded,
    PdError,
    RemoteProtocolError,
    RequestError,
)
from .messages import Error

# The codes of Error.code that have a type of their own; any other code is a RequestError with that code.
PROTOCOL, OVERLOADED, DEADLINE, BROKEN, CLOSED = "protocol", "overloaded", "deadline", "broken", "closed"
CONFIG = "config"
TEXT_CHARS_MAX, FIELD_CHARS_MAX = 4000, 200  # of an error: it may quote what was sent, some of it four times as long


def error_of(problem: PdError, *, kind: str = "", client_id: str = "") -> Error:
    """The `error` that tells a peer of `problem`, in answer to a message of `kind`."""
    code, field, retry_after_ms = BROKEN, "", 0
    match problem:
        case RemoteProtocolError():
            code, kind, field = PROTOCOL, problem.kind or kind, problem.field
        case RequestError():
            code, field = problem.code, problem.param or ""
        case Overloaded():
            code, retry_after_ms = OVERLOADED, problem.retry_after_ms
        case DeadlineExceeded():
            code = DEADLINE
        case Closed():
            code = CLOSED
        case ConfigError():
            code, field = CONFIG, problem.setting
    message, field = str(problem)[:TEXT_CHARS_MAX], field[:FIELD_CHARS_MAX]
    return Error(message=message, kind=kind, field=field, code=code, client_id=client_id, retry_after_ms=retry_after_ms)


def exception_of(error: Error) -> PdError:
    """The exception that a received `error` stands for."""
    match error.code:
        case "protocol":
            return RemoteProtocolError(error.message, kind=error.kind, field=error.field)
        case "overloaded":
            return Overloaded(error.message, retry_after_ms=error.retry_after_ms)
        case "deadline":
            return DeadlineExceeded(error.message)
        case "broken" | "engine":
            return Broken(error.message)
        case "closed" | "shutdown" | "draining":
            return Closed(error.message)
    return RequestError(error.message, param=error.field or None, code=error.code)
