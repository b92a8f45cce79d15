"""The file of bearer keys: a line `NAME KEY` each. Light: control checks it too."""

from __future__ import annotations

import hashlib
import logging
import os
import time

from pdbus.bus.errors import ConfigError
from pdbus.bus.key_folder import check_private, read_text
from pdbus.bus.keys import ALLOWED_BYTES_MAX, NAME

KEY_CHARS_MIN, KEY_CHARS_MAX = 16, 256  # a shorter one could be guessed
LOOK_S = 1.0  # how often the file is looked at

log = logging.getLogger("pdbus.http")


class HttpKeys:
    """Raises ConfigError naming `setting` for a file that will not do. Read again when it changes; where it cannot be,
    the last one stays in force."""

    def __init__(self, path: str, *, setting: str = "--http-keys") -> None:
        self._path = path
        self._setting = setting
        self._looked_s = time.monotonic()
        self._stamp = self._now()
        self._names = self._read()

    def name_of(self, key: str) -> str:
        """Whose key it is; '' for nobody's. Digests are compared, so that its time tells nothing of a key."""
        self._refresh()
        return self._names.get(_digest(key), "")

    def _refresh(self) -> None:
        now = time.monotonic()
        if now - self._looked_s < LOOK_S:
            return
        self._looked_s = now
        if (stamp := self._now()) != self._stamp:
            self._stamp = stamp
            try:
                self._names = self._read()
            except ConfigError as e:
                log.error("the keys stay as they were: %s", e)

    def _now(self) -> tuple[int, int]:
        try:
            found = os.stat(self._path)
        except OSError:
            return (0, 0)
        return (found.st_mtime_ns, found.st_ino)

    def _read(self) -> dict[bytes, str]:
        check_private(self._path, self._setting)
        names: dict[bytes, str] = {}
        text = read_text(self._path, ALLOWED_BYTES_MAX, self._setting)
        for number, line in enumerate(text.splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            where = f"{self._path}, line {number}"
            if len(words) != 2 or not NAME.fullmatch(words[0]):
                raise ConfigError(self._setting, f"{where}: must be NAME KEY, two words")
            if not KEY_CHARS_MIN <= len(words[1]) <= KEY_CHARS_MAX:
                problem = f"the key of {words[0]} must have {KEY_CHARS_MIN} to {KEY_CHARS_MAX} characters"
                raise ConfigError(self._setting, f"{where}: {problem}")
            names[_digest(words[1])] = words[0]
        return names


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
