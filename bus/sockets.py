"""What every ZeroMQ socket of the bus has in common."""

from __future__ import annotations

import ipaddress

import zmq

from .wire import FRAME_BYTES_MAX

QUEUE_MESSAGES = 4096  # high-water mark of each connection; a peer that is so far behind has stopped reading
SOCKETS_MAX = 8192  # of one context; each link takes two, one of them its monitor
HANDSHAKE_MS = 5000  # a connection that says nothing of ZMTP in this time is closed


def configure(socket: zmq.Socket[bytes], address: str) -> None:
    """What every socket of the bus needs, whatever its type."""
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.SNDHWM, QUEUE_MESSAGES)
    socket.set(zmq.RCVHWM, QUEUE_MESSAGES)
    socket.set(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
    socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.set(zmq.IPV6, int(_needs_ipv6(address)))


def new_context() -> zmq.Context[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, SOCKETS_MAX)
    return context


def _needs_ipv6(address: str) -> bool:
    """IPv6 takes IPv4 names in too, but would turn 127.0.0.1 into ::ffff:127.0.0.1 and localhost into ::1 alone."""
    host = address.removeprefix("tcp://").rpartition(":")[0]
    if host == "localhost":
        return False
    try:
        return ipaddress.ip_address(host.strip("[]")).version == 6
    except ValueError:
        return True
