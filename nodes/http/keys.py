"""The file of bearer keys: a line `NAME KEY [at-once=N] [per-minute=N]` each. Light: control checks it too."""

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

log = logging.getLogger("pdbus.http")


class Owner(NamedTuple):
    """Whose a key is, and what may be asked for with it."""

    name: str
    limits: Limits = Limits()


class HttpKeys:
    """Raises ConfigError naming `setting` for a file that will not do. Read again when it changes; where it cannot be,
    the last one stays in force."""

    def __init__(self, path: str, *, setting: str = "--http-keys") -> None:
        self._path = path
        self._setting = setting
        self._looked_s = time.monotonic()
        self._stamp = self._now()
        self._owners = self._read()

    def owner_of(self, key: str) -> Owner | None:
        """None for nobody's. Digests are compared, so that its time tells nothing of a key."""
        self._refresh()
        return self._owners.get(_digest(key))

    def _refresh(self) -> None:
        now = time.monotonic()
        if now - self._looked_s < LOOK_S:
            return
        self._looked_s = now
        if (stamp := self._now()) != self._stamp:
            self._stamp = stamp
            try:
                self._owners = self._read()
            except ConfigError as e:
                log.error("the keys stay as they were: %s", e)

    def _now(self) -> tuple[int, int]:
        try:
            found = os.stat(self._path)
        except OSError:
            return (0, 0)
        return (found.st_mtime_ns, found.st_ino)

    def _read(self) -> dict[bytes, Owner]:
        check_private(self._path, self._setting)
        owners: dict[bytes, Owner] = {}
        text = read_text(self._path, ALLOWED_BYTES_MAX, self._setting)
        for number, line in enumerate(text.splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            where = f"{self._path}, line {number}"
            if len(words) < 2 or not NAME.fullmatch(words[0]):
                raise ConfigError(self._setting, f"{where}: must be NAME KEY, and limits")
            if not KEY_CHARS_MIN <= len(words[1]) <= KEY_CHARS_MAX:
                problem = f"the key of {words[0]} must have {KEY_CHARS_MIN} to {KEY_CHARS_MAX} characters"
                raise ConfigError(self._setting, f"{where}: {problem}")
            try:
                owners[_digest(words[1])] = Owner(words[0], limits_of(words[2:]))
            except ValueError as e:
                raise ConfigError(self._setting, f"{where}: {e}") from None
        return owners


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
