"""Libraries: versions out of package metadata before anything is imported: a mismatched one can end the process."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator

from pdbus.bus.errors import Broken

from .finding import Finding, ok, problem, warning

NIXL_FROM, NIXL_BELOW = (1, 5), (1, 6)
TORCH_FROM, TORCH_BELOW = (2, 9), (2, 14)
IPEX = "intel-extension-for-pytorch"
INSTALL = "pip install 'pdbus[node]'"


def look() -> Iterator[Finding]:
    yield ok("python", platform.python_version())
    variables = {name: value for name, value in os.environ.items() if name.startswith(("UCX_", "NIXL_"))}
    yield ok("UCX and NIXL variables", ", ".join(f"{name}={value}" for name, value in variables.items()) or "none")
    yield ranged("nixl", version("nixl"), NIXL_FROM, NIXL_BELOW)
    yield _flavour()
    yield ranged("torch", version("torch"), TORCH_FROM, TORCH_BELOW)
    yield ipex(version(IPEX), version("torch"))


def version(package: str) -> str:
    """'' when it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def ranged(package: str, found: str, low: tuple[int, int], below: tuple[int, int]) -> Finding:
    wanted = f"{INSTALL}: {package} from {low[0]}.{low[1]}, below {below[0]}.{below[1]}"
    if not found:
        return problem(package, "not installed", wanted)
    if not low <= _minor(found) < below:
        return problem(package, found, wanted)
    return ok(package, found)


def _flavour() -> Finding:
    from pdbus.connector.nixl_agent import load_flavour

    try:
        return ok("NIXL flavour", load_flavour().__package__)
    except (Broken, ImportError) as e:
        return problem("NIXL flavour", str(e), INSTALL)


def ipex(found: str, torch: str) -> Finding:
    """Its binary fits one minor version of torch, and ends the process when imported beside another."""
    if not found:
        return ok("IPEX", "not installed; nothing here needs it")
    if _minor(found) != _minor(torch):
        setting = f"torch {'.'.join(map(str, _minor(found)))}, or no {IPEX}: importing it here would end the process"
        return warning("IPEX", f"{found} beside torch {torch or 'none'}", setting)
    return ok("IPEX", found)


def _minor(text: str) -> tuple[int, ...]:
    parts = text.partition("+")[0].split(".")[:2]
    return tuple(int(part) for part in parts if part.isdigit())
