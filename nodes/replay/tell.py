"""The history of one lease, request or block over all nodes, as tables."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from pdbus.bus.errors import ConfigError
from pdbus.bus.recording import Recording

from .block_history import BlockHistory
from .clocks import aligned
from .cluster_run import title
from .history import Lease, Subject, requests_like, story_of, tries_of
from .story import in_order, merged, table

Named = tuple[str, int]  # [NODE/]NUMBER


def tell_lease(lease: Lease, files: Sequence[Recording], console: Console) -> bool:
    """Returns whether there is such a one; when there is none that is one line on standard error, as below."""
    found = tries_of(lease, files)
    if not found:
        complain(f"no lease {lease} in these recordings")
    for (node, incarnation, generation), subject in found.items():
        console.print(_story(f"lease {generation} of {title((node, incarnation))}", subject, files))
    return bool(found)


def tell_request(beginning: str, files: Sequence[Recording], console: Console) -> bool:
    found = requests_like(beginning.lower(), files)
    if len(found) != 1:
        fits = "no request begins so" if not found else f"{len(found)} requests begin so: give more of the id"
        complain(f"--request {beginning}: {fits}")
        return False
    console.print(_story(f"request {found[0].hex()}", Subject(found[0]), files))
    return True


def _story(name: str, subject: Subject, files: Sequence[Recording]) -> Table:
    offsets = aligned(files)
    stories = [story_of(subject, r, offset) for r, offset in zip(files, offsets, strict=True)]
    return table(name, merged(in_order(stories)))


def tell_block(named_so: Named, files: Sequence[Recording], console: Console) -> bool:
    node, block = named_so
    recordings = [r for r in files if node in ("", r.header.node)]
    offsets = aligned(recordings)
    found = False
    for recording, offset in zip(recordings, offsets, strict=True):
        moments = BlockHistory(block, recording, offset).moments
        if moments:
            found = True
            life = recording.header.node, recording.header.incarnation
            console.print(table(f"block {block} of {title(life)}", moments))
    if not found:
        complain(f"block {block}{f' of {node}' if node else ''} was never used in these recordings")
    return found


def complain(text: str) -> None:
    print(f"pd-replay: {text}", file=sys.stderr)


def named_block(text: str) -> Named | None:
    """[NODE/]NUMBER; None for ''. Raises ConfigError naming --block."""
    if not text:
        return None
    match = re.fullmatch(r"(?:([^/]+)/)?(\d+)", text, re.ASCII)
    if match is None:
        raise ConfigError("--block", f"{text!r}: give its number, or NODE/NUMBER")
    return match[1] or "", int(match[2])


def named_lease(text: str) -> Lease | None:
    """[NODE/[EPOCH/]]GENERATION, as tables print it; None for ''. Raises ConfigError naming --lease."""
    if not text:
        return None
    match = re.fullmatch(r"(?:([^/]+)/(?:(\d+)/)?)?(\d+)", text, re.ASCII)
    if match is None:
        raise ConfigError("--lease", f"{text!r}: give its generation, NODE/GENERATION or NODE/EPOCH/GENERATION")
    return Lease(match[1] or "", int(match[2] or 0), int(match[3]))
