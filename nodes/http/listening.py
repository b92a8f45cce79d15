"""The listening socket that a node binds and its HTTP process inherits. Light: control imports it."""

from __future__ import annotations

import errno
import os
import socket

from pdbus.bus.errors import ConfigError
from pdbus.bus.generation import DEADLINE_MS
from pdbus.bus.ports import HOST_PARTS, may_be_host
from pdbus.bus.wire import Declared

BACKLOG = 2048
PORTS_TRIED_MAX = 100


class HttpArgs(Declared):
    """Everything the process needs, handed over as one JSON string at spawn."""

    bus: str  # the node's bus address
    fd: int  # the listening socket, inherited
    name: str = "http"  # the node's, for the log
    url: str = ""  # how others reach that socket: http[s]://host:port
    keys: str = ""  # folder of keys; this process has the node's
    node_key: str = ""  # the public one that answers at `bus`
    http_keys: str = ""  # file of bearer keys
    tls_cert: str = ""  # PEM files; "": in clear
    tls_key: str = ""
    deadline_ms: int = DEADLINE_MS  # of a request that gives none
    log_format: str = "text"
    parent: int = 0  # its pid, to notice that it died while this process started; 0: do not look


def listen(
    host: str,
    port: int,
    *,
    search: bool = False,
    host_setting: str = "--http-host",
    port_setting: str = "--http-port",
) -> socket.socket:
    """A listening socket for the process to inherit; port 0 is any. With `search` (a default port) the next free one is
    taken instead of a taken one. Raises ConfigError naming the port's setting, or the host's when that cannot be
    bound."""
    host = host.strip("[]")
    if not may_be_host(host):
        raise ConfigError(host_setting, f"{host!r:.80} can be no host: {HOST_PARTS}")
    last = port + PORTS_TRIED_MAX if search and port else port
    for candidate in range(port, min(last, 65_535) + 1):
        try:
            return socket.create_server((host, candidate), family=_family(host), backlog=BACKLOG)
        except OSError as e:
            if e.errno != errno.EADDRINUSE:
                setting = port_setting if e.errno == errno.EACCES else host_setting
                raise ConfigError(setting, f"cannot listen on {host}:{candidate}: {_reason(e)}") from None
        except OverflowError:
            break
    if not 0 <= port <= 65_535:
        raise ConfigError(port_setting, f"must be between 0 and 65535, got {port}")
    raise ConfigError(port_setting, f"{host}:{port} is taken: stop who listens there, or choose another")


def _reason(error: OSError) -> str:
    """`create_server` puts the address into `strerror`; a name that does not resolve has a number below zero."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
