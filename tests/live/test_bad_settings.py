"""A node that cannot be: one line that names the setting, exit status 2, no traceback, and no process left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from pdbus.nodes import cli
from pdbus.nodes.cluster import NODE_COMMAND
from pdbus.nodes.node_process import NodeProcess

from .lone_nodes import free_ports

pytestmark = pytest.mark.live

CODED = ["--engine", "coded", "--kv-blocks", "64", "--listen", "tcp://127.0.0.1:0", "--http-port", "0"]
TORCH = ["--kv-blocks", "64", "--threads", "1", "--listen", "tcp://127.0.0.1:0", "--http-port", "0", "--model"]


class Ended(NamedTuple):
    status: int
    said: str
    left: list[int]  # pids of what it has started and not ended


def run(command: list[str], environ: dict[str, str]) -> Ended:
    mark = secrets.token_hex(8)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PD_")}
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, env={**clean, **environ, "TEST_MARK": mark}
    )
    assert ended.stdout == ""
    return Ended(ended.returncode, ended.stderr, marked(mark))


def marked(mark: str) -> list[int]:
    """Processes that inherited this mark, wherever they hang."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"TEST_MARK={mark}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


# ---------------------------------------------------------------- found before anything is started


def complaint(options: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> str:
    """The one line that `pd-node` says; in this process, which saves starting one."""
    for name in [name for name in os.environ if name.startswith("PD_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "argv", ["pd-node", *options])
    with pytest.raises(SystemExit) as ended:
        cli.node_main()
    out, err = capfd.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    return err


SETTINGS = [
    ([*CODED[:2], "--kv-memory", "1TiB"], "--kv-memory: the KV cache needs 10485"),
    ([*CODED, "--tp", "3"], "--tp: 3 ranks cannot share 2 KV heads; neither number divides the other"),
    ([*CODED, "--tp", "0"], "--tp: 0 is out of range; give a whole number from 1 to 128"),
    ([*CODED, "--kv-layout", "nhd"], "--kv-layout: 'nhd' is not known; give native, NHD or HND"),
    ([*CODED, "--cpus", "4000"], "--cpus: core 4000 cannot be used here; there are "),
    ([*CODED, "--max-model-len", "2000"], "--max-model-len: 2000 tokens do not fit into 64 KV blocks of 16: "),
    (
        [*CODED, "--listen", "tcp://127.0.0.1:7400", "--join", "tcp://127.0.0.1:7400"],
        "--join: tcp://127.0.0.1:7400 is this node's own address: give another member's",
    ),
    ([*CODED, "--run-dir", "/nowhere"], "--run-dir: there is no folder /nowhere"),
    ([*TORCH, "/nowhere"], "--model: there is no /nowhere; give a folder with config.json and *.safetensors"),
]


@pytest.mark.parametrize(("options", "said"), SETTINGS)
def test_a_setting_that_cannot_work_here(
    options: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert complaint(options, monkeypatch, capfd).startswith(f"pd-node: {said}")


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)


def lose_a_tensor(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b"model.norm.weight", b"model.norm.weighx"))


def spoil_a_weight(folder: Path) -> None:
    """The last number becomes NaN."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"\0\0\xc0\x7f")


def drop(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def overwrite(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


MODELS: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (cut, "is truncated: it has "),
    "a tensor missing": (lose_a_tensor, "the checkpoint has no tensor model.norm.weight"),
    "no weights": (drop("model.safetensors"), "has no model.safetensors"),
    "no tokenizer": (drop("tokenizer.json"), "has no tokenizer.json"),
    "no configuration": (drop("config.json"), "has no config.json: it must be a Hugging Face folder"),
    "no JSON": (overwrite("config.json", "{"), "cannot read "),
    "another family": (overwrite("config.json", '{"architectures": ["GPT2LMHead"]}'), "GPT2LMHead is not supported"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_cannot_be_served(
    tiny_llama: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    damage, problem = MODELS[name]
    shutil.copytree(tiny_llama, tmp_path / "model")
    damage(tmp_path / "model")
    said = complaint([*TORCH, str(tmp_path / "model")], monkeypatch, capfd)
    assert said.startswith("pd-node: --model: ") and problem in said


# ---------------------------------------------------------------- found out by trying


def test_a_port_that_was_asked_for_and_is_taken_is_named_as_it_was_written() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        bus = f"tcp://127.0.0.1:{port}"
        runs = {
            "--listen": run([*NODE_COMMAND, *CODED, "--listen", bus], {}),
            "PD_EVENTS": run([*NODE_COMMAND, *CODED], {"PD_EVENTS": bus}),
            "--http-port": run([*NODE_COMMAND, *CODED, "--http-port", str(port)], {}),
        }
    for setting, ended in runs.items():
        assert ended.said.startswith(f"pd-node: {setting}: ") and str(port) in ended.said
        assert ended.said.endswith("is taken: stop who listens there, or choose another\n")
        assert (ended.status, ended.said.count("\n"), ended.left) == (2, 1, [])


def test_weights_that_are_no_numbers_end_the_node_before_it_is_ready(tiny_llama: Path, tmp_path: Path) -> None:
    """Only the worker's first forward pass shows it. What it has to say is said by the node, once."""
    shutil.copytree(tiny_llama, tmp_path / "model")
    spoil_a_weight(tmp_path / "model")
    ended = run([*NODE_COMMAND, *TORCH, str(tmp_path / "model")], {})
    *_, last = ended.said.splitlines()
    assert last == "pd-node: --model: the logits are no finite numbers: the weights are damaged (NaN or infinity)"
    assert (ended.status, ended.said.count("damaged"), ended.said.count("Traceback"), ended.left) == (2, 1, 0, [])


def test_pd_up_says_it_once_for_all_its_nodes(tiny_llama: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_llama, tmp_path / "model")
    lose_a_tensor(tmp_path / "model")
    command = [sys.executable, "-P", "-c", "from pdbus.nodes.cli import main; main()", "up", "--model"]
    ended = run([*command, str(tmp_path / "model")], {})
    assert ended == Ended(2, "pd: --model: the checkpoint has no tensor model.norm.weight\n", [])


# ---------------------------------------------------------------- ports that were not asked for


def test_default_ports_that_are_taken_give_way_and_it_is_said() -> None:
    async def scene() -> list[str]:
        node = NodeProcess("n", "both", (*NODE_COMMAND, "--engine", "coded", "--kv-blocks", "64"), address="")
        await node.start()
        async with asyncio.timeout(30):
            while not any("is ready" in line for line in node.tail):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        node.signal(signal.SIGTERM)
        assert await node.wait() == 0
        await node.close()
        return list(node.tail)

    with contextlib.ExitStack() as stack:
        for port in (7401, 8080):  # of the default triple, the middle one
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
        said = "\n".join(asyncio.run(scene()))
    assert re.search(r"port 740[0-2] is taken: listening on tcp://127\.0\.0\.1:74", said)
    assert "port 8080 is taken: HTTP listens on port 80" in said


def test_events_that_give_way_are_said() -> None:
    """With a bus port that was asked for, its neighbour is the events' only if it is free."""
    bus = free_ports(2)

    async def scene() -> str:
        options = ("--engine", "coded", "--kv-blocks", "64", "--http-port", "0", "--listen", f"tcp://127.0.0.1:{bus}")
        node = NodeProcess("n", "both", (*NODE_COMMAND, *options), address="")
        await node.start()
        async with asyncio.timeout(30):
            while not any("is ready" in line for line in node.tail):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        node.signal(signal.SIGTERM)
        assert await node.wait() == 0
        await node.close()
        return "\n".join(node.tail)

    with socket.create_server(("127.0.0.1", bus + 1)):
        assert f"port {bus + 1} is taken: events on tcp://127.0.0.1:" in asyncio.run(scene())
