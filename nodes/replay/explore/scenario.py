"""What is explored: how many nodes, which requests, what may go wrong."""

from __future__ import annotations

from typing import NamedTuple

from pdbus.bus.errors import ConfigError

FAULTS = {
    "drop": "a message is lost",
    "duplicate": "a message comes twice",
    "expiry": "a clock runs ahead to its next timer, or everything else is late",
    "read": "a read fails",
    "step": "the engine fails a prompt",
    "crash": "a node dies with all that was sent to it, and starts again",
    "restart": "a node dies and starts again; what was sent to it reaches its next life",
    "worker": "a worker dies",
    "mover": "a mover dies",
}


class Scenario(NamedTuple):
    """Late and reordered messages, late writes and a client that cancels cost nothing: they are always possible."""

    prefill: int = 2
    decode: int = 1
    requests: int = 1
    blocks: int = 1  # of a prompt; each is one token long, and one chunk
    faults: int = 1
    kinds: tuple[str, ...] = tuple(FAULTS)
    cancel: bool = True
    tokens: int = 2  # of an answer
    prefill_pool: int = 0  # blocks; 0: enough for all requests
    decode_pool: int = 0
    same_prompt: bool = False  # all requests ask the same; otherwise all but the first token differs
    staged: bool = False  # every node computes in one memory and reads in another

    def pool(self, decodes: bool) -> int:
        """Blocks of a node. For a decode node enough for one attempt's quarantined blocks beside each next one's."""
        if decodes:
            return self.decode_pool or self.requests * (3 * self.blocks + self.tokens)
        return self.prefill_pool or self.requests * self.decode * 2 * self.blocks


def kinds_of(text: str) -> tuple[str, ...]:
    """Of a list such as `drop,expiry`; all for an empty one. Raises ConfigError (`--kinds`)."""
    wanted = [kind.strip() for kind in text.split(",") if kind.strip()]
    unknown = [kind for kind in wanted if kind not in FAULTS]
    if unknown:
        raise ConfigError("--kinds", f"{unknown[0]!r} is not known; give {', '.join(FAULTS)}")
    return tuple(kind for kind in FAULTS if kind in wanted or not wanted)
