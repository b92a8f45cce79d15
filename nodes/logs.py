"""A node's log: one line an event, for people or as JSON; what repeats is said a few times, then counted."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable

from .printable import printable

FORMS = ("text", "json")
FIELDS = ("request", "attempt", "peer")  # of a line, beside its text, where it has them
BURST = 20  # lines of one kind in a window: enough to see what goes on, whatever fails how often
WINDOW_S = 10.0
CHARS_MAX = 4000  # of a message: it may quote what another node says, which has no limit but a frame's
STANDARD = "%(asctime)s {name} %(message)s"


def set_up_logs(name: str, form: str, level: int = logging.INFO) -> None:
    """Of the node or gateway of this name, to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines(name) if form == "json" else TextLines(name))
    handler.addFilter(Repeats())
    logging.basicConfig(level=level, handlers=[handler])


class TextLines(logging.Formatter):
    """`13:02:11 NAME what has happened (request=4f1c peer=p1)`."""

    def __init__(self, name: str) -> None:
        super().__init__(STANDARD.format(name=name.replace("%", "%%")), "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        said = " ".join(f"{key}={value}" for key, value in _fields(record).items())
        line = super().format(record)
        return f"{line} ({_in_one_line(said)})" if said else line

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = _in_one_line(record.message)
        return super().formatMessage(record)


class JsonLines(logging.Formatter):
    """An object a line: time (UTC), level, node, logger, message, and the fields that it has."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "node": self._name,
            "logger": record.name,
            "message": _cut(record.getMessage()),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class Repeats(logging.Filter):
    """Lets BURST lines of one kind through in a window; the first of the next says how many were left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[tuple[str, str], tuple[float, int]] = {}  # since when, how many

    def filter(self, record: logging.LogRecord) -> bool:
        now, kind = self._clock(), (record.name, str(record.msg))
        since, count = self._kinds.get(kind, (now, 0))
        if now - since >= WINDOW_S:
            if count > BURST:
                record.msg, record.args = f"{record.getMessage()} [{count - BURST} like it were left out]", ()
            since, count = now, 0
        self._kinds[kind] = since, count + 1
        return count < BURST


def _in_one_line(text: str) -> str:
    return printable(_cut(text.rstrip("\n")))


def _cut(text: str) -> str:
    return text if len(text) <= CHARS_MAX else f"{text[:CHARS_MAX]}... ({len(text)} characters)"


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {key: getattr(record, key) for key in FIELDS if hasattr(record, key)}
