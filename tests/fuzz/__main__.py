"""python -m tests.fuzz: a real pair of nodes under a million messages and a hundred thousand HTTP requests."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from .siege import besiege


def main(
    wire: Annotated[int, typer.Option(min=20, help="Messages on the bus.")] = 1_000_000,
    http: Annotated[int, typer.Option(min=10, help="HTTP requests.")] = 100_000,
    seed: Annotated[int, typer.Option(help="What is drawn.")] = 1,
) -> None:
    """Exit status 1 when a node serves no longer, has grown, has printed a traceback or answered 500."""
    with tempfile.TemporaryDirectory(prefix="pd") as folder:
        siege = asyncio.run(besiege(Path(folder), wire=wire, http=http, seed=seed))
    print(siege.told())
    for problem in siege.problems:
        print(problem)
    raise typer.Exit(int(bool(siege.problems)))


if __name__ == "__main__":
    typer.run(main)
