"""Nodes of the next minor version, whose messages all have a key more, beside nodes of this one.

To the newer node every message of the older one lacks a key. The newer version is a copy of the package in which each
message has one optional key more, which is never its default on the wire.
"""

from __future__ import annotations

import ast
import asyncio
import shutil
from pathlib import Path

import pytest

import pdbus
from pdbus.bus.client import Client
from pdbus.bus.messages import MESSAGES
from pdbus.nodes.cluster import Cluster

from .faults import OPTIONS, expected, prompt, until_clean

pytestmark = [pytest.mark.live, pytest.mark.long]

KEY = '    of_the_next_minor: str = "new"\n'
VERSION = tuple(map(int, pdbus.__version__.split(".")[:2]))


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder to import it from."""
    folder = tmp_path_factory.mktemp("newer")
    shutil.copytree(Path(pdbus.__file__).parent, folder / "pdbus", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "pdbus" / "__init__.py").write_text(f'__version__ = "{VERSION[0]}.{VERSION[1] + 1}.0"\n')
    messages = folder / "pdbus" / "bus" / "messages.py"
    messages.write_text(with_a_key_more(messages.read_text()))
    return folder


def with_a_key_more(source: str) -> str:
    lines = source.splitlines(keepends=True)
    of_messages = {message.__name__ for message in MESSAGES.values()}
    classes = [n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name in of_messages]
    for node in sorted(classes, key=lambda n: -(n.end_lineno or 0)):
        lines.insert(node.end_lineno or 0, KEY)
    return "".join(lines)


async def versions(client: Client) -> str:
    return (await client.node()).hello.version


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_pair_one_minor_version_apart_hands_over(newer: Path, role: str) -> None:
    async def run() -> None:
        cluster = Cluster(1, 1, options=OPTIONS)
        (node,) = getattr(cluster, role)
        node._environment["PYTHONPATH"] = str(newer)
        async with cluster, Client(cluster.decode[0].address) as d, Client(cluster.prefill[0].address) as p:
            assert await versions(d) != await versions(p)
            for i in range(3):
                answer = d.generate(prompt(100 + i, i), max_tokens=6)
                await answer.whole()
                assert answer.tokens == expected(prompt(100 + i, i), 6)
                assert answer.finished is not None and answer.finished.timeline.remote
            for client in (d, p):
                await until_clean(client)

    asyncio.run(asyncio.wait_for(run(), 90))
