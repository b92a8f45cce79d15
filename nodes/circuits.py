"""Circuits: which prefill nodes are not worth asking for a while. One for each life and epoch of each node.

Theory of operation. An attempt that fails at a node and tells against it (connector/attempt.py, FAILURES) makes it come
last, behind all others, for a while. When several have failed in a row it is not asked at all: requests go elsewhere at
once instead of each finding out for itself. Then one request is its trial, and decides.

    | state     | hears            | becomes   | and                                                            |
    |-----------|------------------|-----------|----------------------------------------------------------------|
    | closed    | failed           | closed    | comes last for 5 s                                             |
    | closed    | failed too often | open      | the third in a row: not asked for 1 s                          |
    | open      | asked            | half-open | after that time: this request is the trial, the only one       |
    | half-open | failed           | open      | of its trial: for twice as long as the last time, at most 5 s  |
    | half-open | undecided        | open      | of its trial: its time is still up, the next one is the trial  |
    | any       | fetched          | closed    | from whichever attempt                                         |

What an attempt that began before the circuit opened fails of is known already, and counts no more. Another incarnation
or epoch is another circuit: a closed one. Nothing here needs a timer, since a circuit does nothing until it is asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

FAILURES_MAX = 3  # in a row; fewer may be one accident that hit several requests, or the request's own
LAST_NS = 5_000_000_000  # how long a node that failed an attempt comes last
OPEN_NS = 1_000_000_000  # at first; about what an attempt loses that finds nobody
OPEN_MAX_NS = 5_000_000_000  # so late at most is it noticed that a node has healed


class CircuitState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Heard(StrEnum):
    """What moves a circuit."""

    FAILED = "failed"
    FAILED_TOO_OFTEN = "failed too often"
    ASKED = "asked"
    FETCHED = "fetched"
    UNDECIDED = "undecided"


TRANSITIONS: dict[tuple[CircuitState, Heard], CircuitState] = {
    (CircuitState.CLOSED, Heard.FAILED): CircuitState.CLOSED,
    (CircuitState.CLOSED, Heard.FAILED_TOO_OFTEN): CircuitState.OPEN,
    (CircuitState.CLOSED, Heard.FETCHED): CircuitState.CLOSED,
    (CircuitState.OPEN, Heard.ASKED): CircuitState.HALF_OPEN,
    (CircuitState.OPEN, Heard.FETCHED): CircuitState.CLOSED,
    (CircuitState.HALF_OPEN, Heard.FAILED): CircuitState.OPEN,
    (CircuitState.HALF_OPEN, Heard.FETCHED): CircuitState.CLOSED,
    (CircuitState.HALF_OPEN, Heard.UNDECIDED): CircuitState.OPEN,
}


@dataclass(slots=True)
class Circuit:
    """Of a node that has failed since it last was fetched from."""

    state: CircuitState = CircuitState.CLOSED
    failures: int = 0  # in a row
    open_ns: int = 0  # how long it was opened for the last time
    trial: bytes = b""  # the request


class Circuits:
    """By peer key: node, incarnation and epoch."""

    def __init__(self) -> None:
        self._circuits: dict[str, Circuit] = {}
        self._until: dict[str, int] = {}  # closed: comes last before this; open: is not asked
        self._asked: dict[bytes, str] = {}  # by request: whom its attempt is asked of

    # ------------------------------------------------------------ choosing

    def admits(self, peer: str, now_ns: int) -> bool:
        """Whether a request may be sent there now."""
        match self.state(peer):
            case CircuitState.CLOSED:
                return True
            case CircuitState.OPEN:
                return self._until[peer] <= now_ns
            case CircuitState.HALF_OPEN:
                return False

    def comes_last(self, peer: str, now_ns: int) -> bool:
        return self._until.get(peer, 0) > now_ns

    def state(self, peer: str) -> CircuitState:
        circuit = self._circuits.get(peer)
        return circuit.state if circuit else CircuitState.CLOSED

    # ------------------------------------------------------------ what became of an attempt

    def asked(self, request: bytes, peer: str) -> None:
        """This request's next attempt goes there; only where `admits`."""
        self._asked[request] = peer
        circuit = self._circuits.get(peer)
        if circuit is not None and circuit.state is CircuitState.OPEN:
            circuit.state, circuit.trial = TRANSITIONS[circuit.state, Heard.ASKED], request

    def failed(self, request: bytes, now_ns: int) -> int:
        """Its attempt tells against the node. For how long that is not asked from now on; 0: not decided by this."""
        peer = self._asked.pop(request, None)
        if peer is None:
            return 0
        circuit = self._circuits.setdefault(peer, Circuit())
        if circuit.state is not CircuitState.CLOSED and circuit.trial != request:
            return 0
        circuit.failures += 1
        heard = Heard.FAILED
        if circuit.state is CircuitState.CLOSED and circuit.failures >= FAILURES_MAX:
            heard = Heard.FAILED_TOO_OFTEN
        circuit.state, circuit.trial = TRANSITIONS[circuit.state, heard], b""
        if circuit.state is CircuitState.CLOSED:
            self._until[peer] = now_ns + LAST_NS
            return 0
        circuit.open_ns = min(2 * circuit.open_ns, OPEN_MAX_NS) if circuit.open_ns else OPEN_NS
        self._until[peer] = now_ns + circuit.open_ns
        return circuit.open_ns

    def fetched(self, request: bytes) -> bool:
        """All went well. Whether that closed a circuit."""
        peer = self._asked.pop(request, "")
        circuit = self._circuits.pop(peer, None)
        self._until.pop(peer, None)
        return circuit is not None and circuit.state is not CircuitState.CLOSED

    def undecided(self, request: bytes) -> None:
        """Its attempt, if it had one, ended in a way that says nothing of the node."""
        circuit = self._circuits.get(self._asked.pop(request, ""))
        if circuit is not None and circuit.trial == request:
            circuit.state, circuit.trial = TRANSITIONS[circuit.state, Heard.UNDECIDED], b""

    def forget(self, life: str, but: str = "") -> None:
        """Peers whose keys begin with `life` are over, but for one epoch's."""
        for peer in [p for p in self._circuits if p.startswith(life) and p != but]:
            del self._circuits[peer]
            self._until.pop(peer, None)
        for request in [r for r, p in self._asked.items() if p.startswith(life) and p != but]:
            del self._asked[request]
