"""Where fetched and converted models are kept, and how a folder appears there: whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_root() -> Path:
    """`$PD_CACHE`, or `~/.cache/pdbus`."""
    root = os.environ.get("PD_CACHE")
    return Path(root).expanduser() if root else Path.home() / ".cache" / "pdbus"


def models_cache() -> Path:
    return cache_root() / "models"


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A scratch folder that becomes `target` when the body ends well; if another process was sooner, its own stays."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        building = Path(scratch, "new")
        building.mkdir()
        yield building
        try:
            building.rename(target)
        except OSError:
            if not target.is_dir():
                raise
