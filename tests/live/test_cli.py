"""The command line as its user sees it: one line for bad input, exit status 2, nothing heavy before it is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdbus import __version__
from pdbus.nodes import cli

pytestmark = pytest.mark.live

PROGRAMS = {"pd": "main", "pd-node": "node_main", "pd-replay": "replay_main"}


def run(program: str, *arguments: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    code = f"from pdbus.nodes.cli import {PROGRAMS[program]}; {PROGRAMS[program]}()"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PD_")}
    return subprocess.run(
        [sys.executable, "-P", "-c", code, *arguments],
        capture_output=True, text=True, timeout=60, env={**clean, **(environ or {})},
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PD_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("pd-node --engine coded --kv-blocks 1", "pd-node: --kv-blocks: 1 is out of range; give a whole number from 2"),
        ("pd-node", "pd-node: --model: is needed: give a folder with config.json"),
        ("pd-node --role prefil", "pd-node: --role: 'prefil' is not known; give prefill, decode or both"),
        ("pd-node --kv-blcks 3", "pd-node: No such option: --kv-blcks"),
        ("pd-node --role", "pd-node: Option '--role' requires an argument."),
        ("pd-node --config /nowhere.toml", "pd-node: --config: cannot read /nowhere.toml: No such file"),
        ("pd-node decode", "pd-node: Got unexpected extra argument"),
        ("pd node --engine coded --lease 30", "pd: --lease: '30' will not do; give a duration such as 30s"),
        ("pd up --prefill many", "pd: Invalid value for '--prefill'"),
        ("pd up --decode 0 --engine coded", "pd: --decode: no node would answer requests"),
        ("pd up --engine coded --block-size 3", "pd: --block-size: 3 is not a power of two"),
        ("pd status nowhere", "pd: ADDRESS: must be like tcp://host:port"),
        ("pd connect tcp://127.0.0.1:7400", "pd: Missing argument 'MEMBER...'"),
        ("pd connect tcp://127.0.0.1:7400 here", "pd: MEMBER: must be like tcp://host:port"),
        ("pd connect here tcp://127.0.0.1:7400", "pd: NODE: must be like tcp://host:port"),
        ("pd disconnect here p", "pd: NODE: must be like tcp://host:port"),
        ("pd frobnicate", "pd: No such command 'frobnicate'."),
        ("pd bench transfer --sizes 1MiB,huge", "pd: --sizes: 'huge' will not do; give a size"),
        ("pd-replay show", "pd-replay: Missing argument 'REQUEST'."),
        ("pd-replay simulate --workload w --link 1e-300", "pd-replay: --link: 1e-300 will not do; give GB/s from"),
        ("pd-replay simulate --workload w --link inf", "pd-replay: --link: inf will not do; give GB/s from"),
        ("pd-replay simulate --workload w --link nan", "pd-replay: --link: nan will not do; give GB/s from"),
        ("pd-replay show /tmp", "pd-replay: REQUEST: /tmp is a folder: say which request, or give --html"),
        ("pd-replay show ab /nowhere.mcap", "pd-replay: /nowhere.mcap: cannot be read: No such file"),
        ("pd-replay explore --kinds drop,flood", "pd-replay: --kinds: 'flood' is not known; give drop, duplicate,"),
        ("pd-replay explore --requests 9", "pd-replay: Invalid value for '--requests'"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    command: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", command.split())
    with pytest.raises(SystemExit) as ended:
        getattr(cli, PROGRAMS[command.split()[0]])()
    out, err = capsys.readouterr()
    assert err.startswith(said)
    assert err.count("\n") == 1
    assert (ended.value.code, out) == (2, "")


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_program_ends_without_a_traceback(program: str) -> None:
    result = run(program, "--frobnicate")
    assert result.stderr == f"{program}: No such option: --frobnicate\n"
    assert (result.returncode, result.stdout) == (2, "")


def test_a_variable_is_blamed_by_its_own_name() -> None:
    result = run("pd-node", "--engine", "coded", environ={"PD_THREADS": "none"})
    assert (result.returncode, result.stderr.startswith("pd-node: PD_THREADS: 'none'")) == (2, True)


def test_an_option_may_be_taken_back(tmp_path: Path) -> None:
    """What a file switches on, the command line can switch off."""
    (tmp_path / "node.toml").write_text("insecure = true\nlisten = 'tcp://10.0.0.5:7400'\nengine = 'coded'\n")
    result = run("pd-node", "--config", str(tmp_path / "node.toml"), "--no-insecure")
    assert result.returncode == 2
    assert result.stderr.startswith("pd-node: listen (node.toml): tcp://10.0.0.5:7400 can be reached")


def test_help_groups_the_options_and_imports_nothing_heavy() -> None:
    code = """
import contextlib, sys
sys.argv = ["pd", "node", "--help"]
from pdbus.nodes.cli import main
with contextlib.suppress(SystemExit):
    main()
import pdbus.nodes.status_view, pdbus.nodes.up
print([name for name in ("torch", "numpy", "uvicorn", "starlette", "nixl") if name in sys.modules], file=sys.stderr)
"""
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    for panel in ("Node", "Bus", "HTTP", "Model", "Memory", "Scheduling", "Hand-off", "Coded engine", "Trace"):
        assert f"─ {panel} ─" in result.stdout
    assert result.stderr == "[]\n"


def test_a_bench_is_printed_as_json(tmp_path: Path) -> None:
    """Whatever a bench measures, `--json` is its dict on one line."""
    code = """
import sys, types
bench = types.ModuleType("pdbus.nodes.bench.bus")
bench.run = lambda messages: {"rtt_us": 1.5, "messages_per_s": messages}
sys.modules["pdbus.nodes.bench.bus"] = bench
sys.argv = ["pd", "bench", "bus", "--messages", "7", "--json"]
from pdbus.nodes.cli import main
main()
"""
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert json.loads(result.stdout) == {"rtt_us": 1.5, "messages_per_s": 7}
    assert result.returncode == 0


def test_a_bad_address_in_the_environment_is_blamed_on_it() -> None:
    result = run("pd", "status", environ={"PD_ADDRESS": "nowhere"})
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("pd: PD_ADDRESS: must be like tcp://host:port")


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_says_its_version(program: str) -> None:
    result = run(program, "--version")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{program} {__version__}\n", "")
