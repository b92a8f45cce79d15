"""Where an answer's text ends: end of sequence, stop tokens, stop strings. Pure; lengths are the scheduler's."""

from __future__ import annotations

from collections.abc import Sequence

from pdbus.bus.messages import Sampling

from .tokenizer import Detokenizer

STOP = "stop"  # the finish reason, as OpenAI names it


class StopChecker:
    """One answer, token by token: what may be said now, and whether it ends here.

    A stop string, and what follows it, is never said; text that may yet become one is held back. The token
    that ends an answer counts as one of its tokens, its own text is not said. Before `min_tokens` nothing ends
    an answer; a stop string that was complete by then does not count later.
    """

    def __init__(self, sampling: Sampling, eos_ids: Sequence[int], detokenizer: Detokenizer) -> None:
        self._ids = (*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_ids))
        self._strings = tuple(string for string in sampling.stop if string)
        self._tokens_left = sampling.min_tokens  # before the answer may end
        self._detokenizer = detokenizer
        self._held = ""
        self._stopped = False

    def add(self, token: int) -> tuple[str, str | None]:
        """The text to say now, and `stop` if the answer ends with this token, else None."""
        self._tokens_left -= 1
        if self._tokens_left <= 0 and token in self._ids:
            return self.finish(), STOP
        text = self._held + self._detokenizer.add((token,))
        end = self._end(text)
        if end is not None:
            self._held, self._stopped = "", True
            return text[:end], STOP
        said = len(text) - unfinished(text, self._strings)
        self._held = text[said:]
        return text[:said], None

    def finish(self) -> str:
        """What was held back, when the answer ends for another reason. Empty after a stop."""
        if self._stopped:
            return ""
        text, self._held, self._stopped = self._held + self._detokenizer.finish(), "", True
        return text[: self._end(text)]

    def _end(self, text: str) -> int | None:
        """Where the first stop string in `text` begins."""
        if self._tokens_left > 0:
            return None
        return min((at for string in self._strings if (at := text.find(string)) >= 0), default=None)


def unfinished(text: str, strings: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of one of `strings`."""
    return max((_overlap(text, string) for string in strings), default=0)


def _overlap(text: str, string: str) -> int:
    longest = min(len(text), len(string) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(string[:n])), 0)
