"""Which requests wait for the digests of what they have read, and what a wrong one means. Pure."""

from __future__ import annotations

from pdbus.connector import handoff as ho
from pdbus.connector.attempt import DIGEST_BYTES

from .events import CheckKv, KvChecked


class KvChecks:
    """Checks that were not answered, one for each request: a worker that is lost is followed by one that is asked
    again."""

    def __init__(self) -> None:
        self._asked: dict[bytes, CheckKv] = {}

    def ask(self, check: ho.CheckKv, node: str) -> CheckKv:
        asked = CheckKv(
            request=check.request,
            attempt=check.attempt,
            node=node,
            blocks=check.blocks,
            begin=check.begin,
            end=check.end,
            size=check.size,
            digests=check.digests,
        )
        self._asked[check.request] = asked
        return asked

    def all(self) -> list[CheckKv]:
        return list(self._asked.values())

    def answered(self, event: KvChecked) -> ho.KvChecked:
        asked = self._asked.get(event.request)
        if asked is not None and asked.attempt == event.attempt:
            del self._asked[event.request]
        return ho.KvChecked(request=event.request, attempt=event.attempt, problem=event.problem)

    def forget(self, request: bytes) -> None:
        """Its attempt is over."""
        self._asked.pop(request, None)


def wrong_digest(check: CheckKv, found: bytes, layers: int) -> str:
    """Names the first block, as the prefill node cuts them, and layer whose digest is not as announced; '' if none."""
    if found == check.digests:
        return ""
    pairs = (slice(at, at + DIGEST_BYTES) for at in range(0, len(check.digests), DIGEST_BYTES))
    at = next(i for i, eight in enumerate(pairs) if found[eight] != check.digests[eight])
    first = check.begin // check.size + at // layers
    tokens = f"tokens {max(check.begin, first * check.size)} to {min(check.end, (first + 1) * check.size) - 1}"
    return f"block {first} ({tokens}) layer {at % layers} is not what {check.node} computed"
