"""The private folder of one control process: its sockets lie there, and go with it, even if it was killed.

The folder's owner holds a lock on a file in it for as long as it lives. Whoever makes a new folder removes those
beside it whose lock nobody holds any more. A lock, and not a pid: pids mean nothing across containers.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "pdbus-"
LOCK = "lock"


class RunDirectory:
    """A new directory of mode 0700 in `parent` ('': the system's temporary one), removed by `close`."""

    def __init__(self, parent: str = "") -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent or None))
        being_made = self.path / f"{LOCK}.new"
        self._lock = os.open(being_made, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        being_made.rename(self.path / LOCK)  # seen only once it is held
        _sweep(self.path.parent, but=self.path)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _sweep(parent: Path, but: Path) -> None:
    """Remove the folders of owners that have ended. Without a lock file, it is being made or not ours."""
    for folder in parent.glob(f"{PREFIX}*"):
        if folder == but:
            continue
        with contextlib.suppress(OSError):
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
