"""The cheapest cluster that meets what is asked of it.

More nodes never make it worse: so what meets the targets with few nodes is looked for from above, and a cluster that
costs as much as one that was found is not tried. Every cluster is simulated once at most.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pdbus.bus.errors import ConfigError

from ...values import duration, show_duration

METRICS = {"ttft": "ttft_ms", "itl": "itl_ms", "latency": "latency_ms"}
QUANTILES = ("mean", "p50", "p90", "p99", "max")
COMPLETED = 0.99  # of the requests, whatever the times of those that are
NODES_MAX = 64  # of each kind, unless said otherwise
_TARGET = re.compile(r"(\w+)\.(\w+)=(.+)")

Figures = Mapping[str, Any]
Play = Callable[[int, int], Figures]  # so many prefill and decode nodes


class Target(NamedTuple):
    metric: str
    quantile: str
    ns: int

    def met(self, figures: Figures) -> bool:
        return bool(figures[METRICS[self.metric]][self.quantile] * 1e6 <= self.ns)

    def __str__(self) -> str:
        return f"{self.metric}.{self.quantile}={show_duration(self.ns)}"


def parse_target(text: str) -> Target:
    """`ttft.p90=2s`. Raises ConfigError (`--target`)."""
    found = _TARGET.fullmatch(text.strip())
    if found is None or found[1] not in METRICS or found[2] not in QUANTILES:
        wanted = f"give ttft, itl or latency, then one of {', '.join(QUANTILES)}, and a time: ttft.p90=2s"
        raise ConfigError("--target", f"{text!r} is no target: {wanted}")
    try:
        return Target(found[1], found[2], duration(1, 86_400 * 10**9)(found[3]))
    except ValueError as e:
        raise ConfigError("--target", f"{text!r}: {e}") from None


class Tried(NamedTuple):
    prefill: int
    decode: int
    meets: bool
    figures: Figures


class Search:
    """`most`: prefill and decode nodes at most. A decode node costs `decode_cost` prefill nodes."""

    def __init__(self, play: Play, targets: Sequence[Target], most: tuple[int, int], decode_cost: float = 1.0) -> None:
        self.tried: dict[tuple[int, int], Tried] = {}
        self._play = play
        self._targets = targets
        self._most = most
        self._decode_cost = decode_cost

    def cheapest(self) -> Tried | None:
        """None: the largest cluster does not meet them either."""
        prefill_most, decode_most = self._most
        if not self._meets(prefill_most, decode_most):
            return None
        least_prefill = max(1, self._busy_prefill())
        prefill_least = self._least(least_prefill, prefill_most, lambda p: self._meets(p, decode_most))
        decode_least = self._least(1, decode_most, lambda d: self._meets(prefill_most, d))
        best = self.tried[prefill_least, decode_most]
        prefill = prefill_least
        while prefill <= prefill_most and self.cost(prefill, decode_least) < self.cost(best.prefill, best.decode):
            most = self._affordable(prefill, self.cost(best.prefill, best.decode), decode_most)
            if most >= decode_least and self._meets(prefill, most):
                decode = self._least(decode_least, most, lambda d, p=prefill: self._meets(p, d))  # type: ignore[misc]
                best = self.tried[prefill, decode]
            prefill += 1
        return best

    def cost(self, prefill: int, decode: int) -> float:
        """In prefill nodes."""
        return prefill + decode * self._decode_cost

    def _affordable(self, prefill: int, below: float, most: int) -> int:
        """Decode nodes with which the whole costs less than `below`."""
        return min(most, math.ceil((below - prefill) / self._decode_cost - 1e-9) - 1)

    def _busy_prefill(self) -> int:
        """As many as would compute all the time: fewer cannot do the work."""
        busy: float = self.tried[self._most].figures["prefill_busy"]
        return math.ceil(busy * self._most[0] - 1e-9)

    def _least(self, low: int, high: int, meets: Callable[[int], bool]) -> int:
        """The least that meets, knowing that `high` does."""
        while low < high:
            middle = (low + high) // 2
            if meets(middle):
                high = middle
            else:
                low = middle + 1
        return high

    def _meets(self, prefill: int, decode: int) -> bool:
        known = self.tried.get((prefill, decode))
        if known is None:
            figures = self._play(prefill, decode)
            enough = figures["completed"] >= COMPLETED * figures["requests"]
            meets = enough and all(target.met(figures) for target in self._targets)
            known = self.tried[prefill, decode] = Tried(prefill, decode, meets, figures)
        return known.meets
