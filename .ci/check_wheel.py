"""Builds the wheel through the sdist and compares what it holds with the tree: neither may lack a file."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("bus", "connector", "nodes")


def in_tree() -> set[str]:
    """The package's files as they should be named in the wheel."""
    files = {f"pdbus/{p.name}" for p in (ROOT / "src/pdbus").iterdir() if p.is_file()}
    for part in PARTS:
        found = (p for p in (ROOT / part).rglob("*") if p.is_file() and "__pycache__" not in p.parts)
        files |= {f"pdbus/{p.relative_to(ROOT)}" for p in found}
    return files


def in_wheel() -> set[str]:
    with tempfile.TemporaryDirectory() as out:
        subprocess.run(
            [sys.executable, "-m", "build", "--outdir", out, str(ROOT)], check=True, stdout=subprocess.DEVNULL
        )
        (wheel,) = Path(out).glob("*.whl")
        names = zipfile.ZipFile(wheel).namelist()
    return {name for name in names if name.startswith("pdbus/")}


def main() -> int:
    tree, wheel = in_tree(), in_wheel()
    for name in sorted(tree - wheel):
        print(f"not in the wheel: {name}", file=sys.stderr)
    for name in sorted(wheel - tree):
        print(f"only in the wheel: {name}", file=sys.stderr)
    print(f"{len(wheel)} files in the wheel, {len(tree)} in the tree")
    return int(tree != wheel)


if __name__ == "__main__":
    sys.exit(main())
