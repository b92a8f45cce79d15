"""The file of bearer keys: lines of `NAME KEY [operator] [at-once=N] [per-minute=N]`. Light: control checks it too."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from typing import NamedTuple

from pdbus.bus.errors import ConfigError
from pdbus.bus.key_folder import check_private, read_text
from pdbus.bus.keys import ALLOWED_BYTES_MAX, NAME

from .quotas import Limits, limits_of

KEY_CHARS_MIN, KEY_CHARS_MAX = 16, 256  # a shorter one could be guessed
LOOK_S = 1.0  # how often the file is looked at
OPERATOR = "operator"

log = logging.getLogger("pdbus.http")


class Owner(NamedTuple):
    """Whose a key is, and what may be asked for with it."""

    name: str
    limits: Limits = Limits()
    operates: bool = False  # may say which prefill nodes are used


class HttpKeys:
    """Raises ConfigError naming `setting` for a file that will not do. Read again when it changes; where it cannot be,
    the last one stays in force, and it is tried again: what is wrong may be mended without a change of the text."""

    def __init__(self, path: str, *, setting: str = "--http-keys") -> None:
        self._path = path
        self._setting = setting
        self._looked_s = time.monotonic()
        self._stamp = self._now()
        self._owners = self._read()
        self._trouble = ""  # why it cannot be read now, as it was logged

    def owner_of(self, key: str) -> Owner | None:
        """None for nobody's. Digests are compared, so that its time tells nothing of a key."""
        self._refresh()
        return self._owners.get(_digest(key))

    def _refresh(self) -> None:
        now = time.monotonic()
        if now - self._looked_s < LOOK_S:
            return
        self._looked_s = now
        stamp = self._now()
        if stamp == self._stamp:
            return
        try:
            self._owners = self._read()
        except ConfigError as e:
            if self._trouble != str(e):
                self._trouble = str(e)
                log.error("the keys stay as they were: %s", e)
            return
        self._stamp, self._trouble = stamp, ""

    def _now(self) -> tuple[int, int, int]:
        try:
            found = os.stat(self._path)
        except OSError:
            return (0, 0, 0)
        return (found.st_mtime_ns, found.st_size, found.st_ino)

    def _read(self) -> dict[bytes, Owner]:
        check_private(self._path, self._setting)
        owners: dict[bytes, Owner] = {}
        text = read_text(self._path, ALLOWED_BYTES_MAX, self._setting)
        for number, line in enumerate(text.splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            try:
                owner = _owner(words)
                if other := owners.get(_digest(words[1])):
                    raise ValueError(f"{other.name} and {owner.name} have one key: every line needs its own")
            except ValueError as e:
                raise ConfigError(self._setting, f"{self._path}, line {number}: {e}") from None
            owners[_digest(words[1])] = owner
        return owners


def _owner(words: list[str]) -> Owner:
    """Of one line. Raises ValueError saying what is wrong, without the key."""
    if len(words) < 2 or not NAME.fullmatch(words[0]):
        raise ValueError("must be NAME KEY, and limits")
    name, key, *more = words
    if not KEY_CHARS_MIN <= len(key) <= KEY_CHARS_MAX:
        raise ValueError(f"the key of {name} must have {KEY_CHARS_MIN} to {KEY_CHARS_MAX} characters")
    if not key.isascii():
        raise ValueError(f"the key of {name} must be plain ASCII, as headers are")
    return Owner(name, limits_of([word for word in more if word != OPERATOR]), OPERATOR in more)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
