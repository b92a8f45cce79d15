"""`pd-replay ...`: what each command takes; the modules beside this one do it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from ..options import group

replay = group("Look into recordings.")


@replay.callback()
def _replay() -> None:
    """Look into recordings."""


@replay.command()
def show(
    request: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST", help="Its id (as HTTP shows it, too) or how that begins, or the client's id."
        ),
    ],
    folders: Annotated[list[Path] | None, typer.Argument(metavar="[DIR...]", help="Folders of --record.")] = None,
) -> None:
    """Show what happened to one request, on all nodes."""
    from .show import show_request

    raise typer.Exit(show_request(_request_id(request), folders or [Path()]))


@replay.command()
def verify(
    folders: Annotated[list[Path] | None, typer.Argument(metavar="[DIR...]", help="Folders of --record.")] = None,
    *,
    lease: Annotated[str, typer.Option(metavar="[NODE/]N", help="Show the history of this lease.")] = "",
    request: Annotated[str, typer.Option(metavar="HEX", help="Show the history of this request.")] = "",
    block: Annotated[str, typer.Option(metavar="[NODE/]N", help="Show the history of this KV block.")] = "",
) -> None:
    """Run every node's decisions again and check the whole cluster. Exit status 1: something is wrong."""
    from .verify import named, verify

    code = verify(
        folders or [Path()],
        lease=named("--lease", lease),
        request=_request_id(request),
        block=named("--block", block),
    )
    raise typer.Exit(code)


def _request_id(text: str) -> str:
    """Without what HTTP puts before it."""
    return re.sub("^(chat)?cmpl-", "", text)
