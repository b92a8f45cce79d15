"""Public traces, where they are: a folder `shared/traces` beside the project, or that of PDBUS_TRACES."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.docs_blocks import ROOT


def trace(name: str) -> Path:
    """The file; the test is skipped where there is none."""
    above = [parent / "shared/traces" for parent in ROOT.parents]
    folders = [Path(named)] if (named := os.environ.get("PDBUS_TRACES")) else above
    found = next((folder / name for folder in folders if (folder / name).is_file()), None)
    if found is None:
        pytest.skip(f"no public trace {name} in {', '.join(map(str, folders))}: set PDBUS_TRACES")
    return found
