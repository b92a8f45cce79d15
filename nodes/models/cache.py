"""Where fetched and converted models are kept, and how a folder appears there: whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pdbus.bus.errors import ConfigError

SETTING = "PD_CACHE"


def cache_root() -> Path:
    """`$PD_CACHE`, or `~/.cache/pdbus`. Raises ConfigError naming PD_CACHE where there is no home folder."""
    try:
        return Path(os.environ.get(SETTING) or "~/.cache/pdbus").expanduser()
    except RuntimeError as e:  # a user without an entry in passwd, as in some containers
        raise ConfigError(SETTING, f"{e} Set it to a folder that can be written") from None


def models_cache() -> Path:
    return cache_root() / "models"


def is_cached(target: Path) -> bool:
    """Whether a model's folder is there. A cache that we may not look into has none."""
    return os.path.isfile(target / "config.json")


def is_in_cache(folder: Path) -> bool:
    """Whether `folder` (resolved) is one of the cache's, which can be made anew."""
    try:
        return folder.parent == models_cache().resolve()
    except ConfigError:
        return False


def unwritable(folder: Path, error: Exception) -> ConfigError:
    """What is said of a cache that cannot be made or written."""
    problem = getattr(error, "strerror", None) or error
    return ConfigError(SETTING, f"cannot write to {folder}: {problem}; set it to a folder that can be written")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A scratch folder that becomes `target` when the body ends well; if another process was sooner, its own stays.

    Raises ConfigError naming PD_CACHE and the folder when it cannot be made or written, which includes every OSError
    of the body: it must see to those of what it reads.
    """
    try:
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
    except OSError as e:
        raise unwritable(target.parent, e) from None
