"""Every error as OpenAI's error object: `{"error": {"message", "type", "param", "code"}}` with a fitting status."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from pdbus.bus import wire
from pdbus.bus.answers import exception_of
from pdbus.bus.errors import Broken, DeadlineExceeded, LocalProtocolError, Overloaded, PdError, RequestError
from pdbus.bus.messages import Finished

from .quotas import RateLimited

TEXT_CHARS_MAX = 1000  # of a message or param: both may quote what the client sent

# When the error itself does not say: (HTTP status, type, code), most special first.
KINDS: tuple[tuple[type[PdError], int, str, str], ...] = (
    (RateLimited, 429, "rate_limit_error", "rate_limit_exceeded"),
    (Overloaded, 429, "overloaded_error", "overloaded"),
    (DeadlineExceeded, 504, "timeout_error", "deadline_exceeded"),
    (LocalProtocolError, 500, "internal_error", "internal_error"),
    (PdError, 503, "unavailable_error", "unavailable"),
)
STATUS_OF_CODE = {"model_not_found": 404, "wrong_role": 421, "forbidden": 403}
HTTP_NAMES = {"json_schema": "response_format"}  # of the SDK's fields that are called otherwise here
CLOSING = (408, 413)  # the body has not been read: what follows on the connection is no request


class JSON(Response):
    """A JSON answer of plain or declared values."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return wire.to_json(content)


def error_object(error: PdError) -> tuple[int, dict[str, Any]]:
    """The HTTP status and the body that say `error`."""
    if isinstance(error, RequestError):
        status = STATUS_OF_CODE.get(error.code, error.status)
        error = renamed(error, HTTP_NAMES)
        return status, _object(str(error), "invalid_request_error", error.code, error.param)
    status, kind, code = next((status, kind, code) for cls, status, kind, code in KINDS if isinstance(error, cls))
    return status, _object(str(error), kind, code)


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """With the field's name as the client wrote it."""
    name, message = names.get(error.param or ""), str(error)
    if name is None:
        return error
    if message.startswith(said := f"{error.param}: "):
        message = f"{name}: {message.removeprefix(said)}"
    return RequestError(message, param=name, code=error.code, status=error.status)


def _object(message: str, kind: str, code: str, param: str | None = None) -> dict[str, Any]:
    param = param[:TEXT_CHARS_MAX] if param else None
    return {"error": {"message": message[:TEXT_CHARS_MAX], "type": kind, "param": param, "code": code}}


def error_headers(error: PdError, status: int) -> dict[str, str]:
    """Retry-After in whole seconds, for OpenAI's clients in milliseconds too."""
    if isinstance(error, Overloaded):
        seconds = max(1, math.ceil(error.retry_after_ms / 1000))
        return {"retry-after": str(seconds), "retry-after-ms": str(error.retry_after_ms)}
    if status == 401:
        return {"connection": "close", "www-authenticate": "Bearer"}
    return {"connection": "close"} if status in CLOSING else {}


async def on_pd_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, PdError)
    status, body = error_object(error)
    return JSON(body, status, error_headers(error, status))


async def on_http_error(request: Request, error: Exception) -> Response:
    """Starlette's own: an unknown path, a method that the path does not have."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    path = request.scope["path"]  # its URL would be made of the Host header, too
    message, code = f"{error.detail}: {request.method} {path}", "invalid_request"
    if error.status_code == 404:
        message, code = f"there is no {path} here", "not_found"
    elif error.status_code == 405:
        takes = ", ".join(sorted(headers.get("Allow", "").split(", ")))  # Starlette's own order is any
        message, code = f"{path} takes {takes}, not {request.method}", "method_not_allowed"
    return JSON(_object(message, "invalid_request_error", code), error.status_code, headers)


async def on_bug(_: Request, error: Exception) -> Response:
    """A bug of ours: the traceback goes to the log, not to the client."""
    said = _object(f"internal error: {type(error).__name__}", "internal_error", "internal_error")
    return JSON(said, 500, {"connection": "close"})  # uvicorn will


async def on_gone(_: Request, __: Exception) -> Response:
    """The client left while it sent its request: nobody reads this."""
    return Response(status_code=400)


HANDLERS: Mapping[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
    PdError: on_pd_error,
    HTTPException: on_http_error,
    ClientDisconnect: on_gone,
    Exception: on_bug,
}  # of every app


def good_end(finished: Finished | None) -> Finished:
    """The end of a request, when it is one that a client may take for an answer; raises what it was otherwise."""
    if finished is not None and finished.error is None and finished.reason in ("stop", "length"):
        return finished
    if finished is not None and finished.error is not None:
        raise exception_of(finished.error)
    raise Broken("the node ended the request before its answer was complete")
