"""Every error pdbus raises on purpose. The type says whose fault it is; the fields hold the facts."""


class PdError(Exception):
    """Root of the tree. `str()` is one line fit for a user."""


class ConfigError(PdError):
    """A setting cannot work. `setting` names it as the user wrote it (`--kv-blocks`, `PD_NAME`, a TOML key)."""

    def __init__(self, setting: str, problem: str) -> None:
        super().__init__(f"{setting}: {problem}")
        self.setting = setting
        self.problem = problem


class LocalProtocolError(PdError):
    """We tried to say something the protocol does not allow. A bug of ours, or of the SDK's caller."""


class RemoteProtocolError(PdError):
    """A peer said something the protocol does not allow. Carries what an `error` reply needs."""

    def __init__(self, problem: str, *, kind: str = "", field: str = "") -> None:
        super().__init__(problem)
        self.kind = kind
        self.field = field


class RequestError(PdError):
    """The request itself is at fault (HTTP 400). `param` names the field, `code` is machine readable."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str = "invalid_request", status: int = 400
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class Overloaded(PdError):
    """No room now; `retry_after_ms` is our best guess of when there will be."""

    def __init__(self, message: str, *, retry_after_ms: int) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class DeadlineExceeded(PdError):
    """Nothing came back in the time that was given."""


class Closed(PdError):
    """The endpoint, client, link or node has been closed."""


class Broken(PdError):
    """A part of the system failed under us (a worker or mover died, NIXL raised)."""
