"""intel-extension-for-pytorch, where `pdbus[ipex]` has installed it: its kernels come with its import.

It must be of the torch release beside it, by major and minor version. The import of another one ends the process, so
versions are compared by what the packages say of themselves, before anything is imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from pdbus.bus.errors import ConfigError

PACKAGE = "intel_extension_for_pytorch"
EXTRA = "pdbus[ipex]"


def check_ipex(version_of: Callable[[str], str] = version) -> bool:
    """Whether it is installed. Raises ConfigError naming the extra for one that was made for another torch."""
    try:
        own, torch = version_of(PACKAGE), version_of("torch")
    except PackageNotFoundError:
        return False
    if _release(own) != _release(torch):
        raise ConfigError(
            EXTRA,
            f"{PACKAGE} {own} needs torch {'.'.join(_release(own))}, here is torch {torch}: "
            f"pip install '{EXTRA}' in an environment of its own, or pip uninstall {PACKAGE}",
        )
    return True


def load_ipex() -> bool:
    """Import it, if it is installed. Raises ConfigError as `check_ipex`."""
    if found := check_ipex():
        importlib.import_module(PACKAGE)
    return found


def _release(text: str) -> list[str]:
    return text.split("+")[0].split(".")[:2]
