"""README and docs/ as a reader types them: every command runs, in order, and prints what the page says.

Nodes run the coded engine, unless a page loads a model of its own: the commands are the same, the answers are not.
Ports are what the machine has free, so a page's own are read as names. What is not run says so on the page.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from pdbus.bus.ports import is_free
from pdbus.nodes.config import load
from pdbus.nodes.node_process import descendants

from tests.docs_blocks import DOCUMENTS, ROOT, RUN, SHOWN, Block, Names, Typed, blocks, first_missing, fits, typed

pytestmark = pytest.mark.live

WAIT_S = 40.0  # for a server to print what it should, or a command to end, on a busy machine
RETRY_S = 10.0  # for what a page shows of a state that takes a moment
RETRIED = ("pd status", "pd-replay")
PORTS = re.compile(r"\b(7[45]\d\d|80[89]\d)\b")  # what pages use; each reserves the one after it, for events


class Server:
    """A command in a terminal of its own, with the lines that it has printed."""

    def __init__(self, command: str, folder: Path, environment: dict[str, str]) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=folder, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines += [""]
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    def missing(self, expected: list[str], names: Names) -> str:
        """The first line that has not come yet; lines of several nodes come in any order."""
        for line in expected:
            hit = next((said for said in list(self.lines) if fits(line, said)), None)
            if line.strip() not in ("", "...") and hit is None:
                return line
            names.learn(line, hit or "")
        return ""

    def end(self, number: signal.Signals) -> int:
        below = descendants(self.process.pid)
        with suppress(ProcessLookupError):
            self.process.send_signal(number)
        try:
            return self.process.wait(WAIT_S)
        finally:
            for pid in (*below, self.process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._reader.join(5)


class Reader:
    """Someone who follows one page from top to bottom."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.names = Names()
        self.servers: list[Server] = []
        self._environment = environment

    def follow(self, block: Block) -> None:
        environment = {**self._environment, **dict(note.split("=") for note in block.notes if "=" in note)}
        if "stop" in block.notes:
            self.stop_all()
        if "make" in block.notes:
            check_targets(block)
        elif block.language == "python":
            self._run([sys.executable, "-c", self._real("\n".join(block.lines))], block.where, environment)
        elif block.language == "toml":
            (self.folder / "node.toml").write_text("\n".join(block.lines))
            load({"engine": "coded"}, {}, file=self.folder / "node.toml")
        else:
            for command in typed(block):
                self._type(command, block.where, environment)

    def _type(self, command: Typed, where: str, environment: dict[str, str]) -> None:
        if command.command == "^C":
            server = self.servers.pop()
            assert server.end(signal.SIGINT) == 0, where
            assert not server.missing(command.expected, self.names), (where, server.lines)
        elif command.is_server:
            self.servers.append(Server(self._real(command.command), self.folder, environment))
            self._until(lambda: self._server_lacks(command), WAIT_S, where)
        else:
            patience_s = RETRY_S if command.command.startswith(RETRIED) else 0
            self._until(lambda: self._once(command, where, environment), patience_s, where)

    def _server_lacks(self, command: Typed) -> str:
        server = self.servers[-1]
        missing = server.missing(command.expected, self.names)
        if missing and server.process.poll() is not None:
            pytest.fail(f"`{command.command}` ended without {missing!r}:\n" + "\n".join(server.lines))
        return missing and f"`{command.command}` does not print {missing!r} but:\n" + "\n".join(server.lines)

    def _once(self, command: Typed, where: str, environment: dict[str, str]) -> str:
        said = self._run(["bash", "-c", self._real(command.command)], where, environment)
        missing = first_missing(command.expected, said.splitlines(), self.names)
        return missing and f"`{command.command}` does not print {missing!r} but:\n{said}"

    def _run(self, arguments: list[str], where: str, environment: dict[str, str]) -> str:
        ended = subprocess.run(
            arguments, cwd=self.folder, env=environment, text=True, timeout=WAIT_S,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert ended.returncode == 0, f"{where}: {arguments[-1]}: exit status {ended.returncode}\n{ended.stdout}"
        return ended.stdout

    def _until(self, lacks: Callable[[], str], patience_s: float, where: str) -> None:
        end_s = time.monotonic() + patience_s
        while missing := lacks():
            assert time.monotonic() < end_s, f"{where}: {missing}"
            time.sleep(0.05)

    def _real(self, command: str) -> str:
        """The command with ports and ids of this run."""
        for said in PORTS.findall(command):
            self.names.real.setdefault(said, free_port())
        return self.names.put_in(command)

    def stop_all(self) -> None:
        while self.servers:
            server = self.servers.pop()
            assert server.end(signal.SIGTERM) == 0, "\n".join(server.lines)


def free_port() -> str:
    """One that is free, like the one after it."""
    while True:
        port = random.randrange(20_000, 32_000, 2)
        if is_free("127.0.0.1", port) and is_free("127.0.0.1", port + 1):
            return str(port)


def check_targets(block: Block) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for command in typed(block):
        target = re.fullmatch(r"make (\S+)", command.command)
        assert target and re.search(rf"^{target[1]}:", makefile, re.M), f"{block.where}: {command.command}"


@pytest.fixture
def reader(tmp_path: Path, tiny_llama: Path) -> Iterator[Reader]:
    demo = tmp_path / "cache/models/smollm2-135m-instruct"
    demo.mkdir(parents=True)
    (demo / "config.json").write_text("{}")  # as if it had been fetched: the coded engine reads no model
    shutil.copytree(tiny_llama, tmp_path / "my-llama")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PD_", "COLUMNS"))}
    programs = os.pathsep.join((str(Path(sys.executable).parent), clean.get("PATH", "")))
    settings = {"PD_ENGINE": "coded", "PD_KV_BLOCKS": "1024", "PD_CACHE": str(tmp_path / "cache")}
    someone = Reader(tmp_path, {**clean, **settings, "PATH": programs, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"})
    try:
        yield someone
        someone.stop_all()
    finally:
        for server in someone.servers:
            server.end(signal.SIGKILL)


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if any(b.language in RUN for b in blocks(d))])
def test_what_a_page_says_is_what_happens(document: str, reader: Reader) -> None:
    for block in blocks(document):
        if block.language in RUN and not block.untested:
            reader.follow(block)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_block_is_run_or_says_that_it_is_not(document: str) -> None:
    """No other languages: a ```bash block would be a way around."""
    for block in blocks(document):
        assert block.language in (*RUN, *SHOWN), f"{block.where}: ```{block.language} is not run"
