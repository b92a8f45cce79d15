"""What steps, reads and answers took lately. Pure: each measurement comes in with its time, the latest weigh most."""

from __future__ import annotations

KEEP = 0.9  # of what was measured before, at each measurement: some ten of the last ones count
SPREAD_LEAST = 0.01  # of sizes, as variance by mean square, to tell what is fixed from what each one costs
VALID_NS = 60_000_000_000  # a machine is judged by what it did so long ago at most; then it is as good as a new one


class Ratio:
    """Nanoseconds for each of something: token, step, round trip."""

    def __init__(self) -> None:
        self._ns = self._units = 0.0
        self._at = 0

    def add(self, ns: float, units: float, now: int) -> None:
        keep = KEEP if now - self._at <= VALID_NS else 0.0
        self._ns, self._units, self._at = keep * self._ns + ns, keep * self._units + units, now

    def per(self, now: int) -> float:
        """0.0: not known."""
        return self._ns / self._units if self._units and now - self._at <= VALID_NS else 0.0


class Line:
    """Nanoseconds that one more of something costs, and what it costs to begin: the straight line through sizes and
    times."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._at = 0

    def add(self, ns: float, size: float, now: int) -> None:
        keep = KEEP if now - self._at <= VALID_NS else 0.0
        self._n, self._x, self._y = keep * self._n + 1, keep * self._x + size, keep * self._y + ns
        self._xx, self._xy = keep * self._xx + size * size, keep * self._xy + size * ns
        self._at = now

    def fit(self, now: int) -> tuple[float, float]:
        """(each, fixed), neither below 0. Sizes that hardly differ tell nothing of what is fixed. (0.0, 0.0): not
        known."""
        if not self._n or now - self._at > VALID_NS:
            return 0.0, 0.0
        spread = self._n * self._xx - self._x * self._x
        if spread > SPREAD_LEAST * self._n * self._xx:
            each = (self._n * self._xy - self._x * self._y) / spread
            fixed = (self._y - each * self._x) / self._n
            if each > 0 and fixed >= 0:
                return each, fixed
        return self._y / self._x, 0.0


class StepRates:
    """Of a node's own steps."""

    def __init__(self) -> None:
        self._prompt, self._decode = Line(), Ratio()

    def stepped(self, prompt_tokens: int, decodes: bool, steps: int, compute_ns: int, now: int) -> None:
        """So many tokens of prompts were computed. `decodes`: and answers beside, a token of each. `steps`: how many
        tokens of each, where no prompt was."""
        if not prompt_tokens:
            self._decode.add(compute_ns, steps, now)
            return
        beside_ns = self._decode.per(now) if decodes else 0.0
        self._prompt.add(max(compute_ns - beside_ns, 0.0), prompt_tokens, now)

    def prompt_ns(self, now: int) -> tuple[float, float]:
        """A token of a prompt, and a step of such tokens beside: beyond what answers in the step cost. 0.0 for a token:
        not known."""
        return self._prompt.fit(now)

    def decode_ns(self, now: int) -> float:
        """A step in which nothing but answers was computed. 0.0: not known."""
        return self._decode.per(now)

    def said(self, now: int) -> tuple[int, int]:
        """For heartbeats: tokens of prompts a second, 0: not known; and microseconds that a step costs beside."""
        token_ns, step_ns = self.prompt_ns(now)
        return (max(1, int(1e9 / token_ns)), int(step_ns / 1000)) if token_ns else (0, 0)
