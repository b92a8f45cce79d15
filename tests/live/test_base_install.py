"""`pip install pdbus` without extras: a command that needs more says in one line what brings it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.live

# Every package of an extra is as good as not installed: importing it raises, and nobody finds it.
BASE_ONLY = """
import sys
from pdbus.nodes.extras import EXTRAS
sys.modules.update(dict.fromkeys(EXTRAS))
from pdbus.nodes import cli
getattr(cli, sys.argv.pop(1))()
"""


def base(main: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PD_")}
    command = [sys.executable, "-c", BASE_ONLY, main, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=clean)


@pytest.mark.parametrize(
    "command",
    [
        ("main", "up", "--engine", "coded"),
        ("main", "up", "--model", "smollm2-135m-instruct"),
        ("main", "demo"),
        ("main", "bench", "transfer"),
        ("main", "bench", "engine"),
        ("main", "bench", "serve"),
        ("main", "bench", "plan"),
        ("node_main", "--engine", "coded", "--listen", "tcp://127.0.0.1:0"),
    ],
    ids=lambda command: " ".join(command[1:3]),
)
def test_what_a_command_needs_is_one_line(command: tuple[str, ...]) -> None:
    ended = base(*command)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1), ended.stderr
    assert "needs the package " in ended.stderr and "pip install 'pdbus[node]'" in ended.stderr


@pytest.mark.parametrize("command", [("main", "--help"), ("main", "up", "--help"), ("replay_main", "--help")])
def test_help_needs_nothing_more(command: tuple[str, ...]) -> None:
    assert base(*command).returncode == 0
