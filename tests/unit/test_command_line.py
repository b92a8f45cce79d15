"""What every command refuses before it looks at its own options."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from pdbus.nodes.cli import main, node_main, replay_main


def refused(capsys: pytest.CaptureFixture[str], program: Callable[[], None]) -> str:
    with pytest.raises(SystemExit) as ended:
        program()
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "arguments", "said"),
    [
        (node_main, ["--record", ""], "pd-node: --record"),
        (node_main, ["--join", ","], "pd-node: --join"),
        (node_main, ["--record="], "pd-node: --record"),
        (main, ["gateway", "--join", "tcp://127.0.0.1:1", "--keys", ""], "pd: --keys"),
        (main, ["status", ""], "pd: an argument"),
        (main, ["status", "--keys", " "], "pd: --keys"),
        (main, ["bench", "profile", "--out", ""], "pd: --out"),
        (replay_main, ["verify", "rec", "--request", ""], "pd-replay: --request"),
        (replay_main, ["show", "x", "--html="], "pd-replay: --html"),
    ],
)
def test_an_empty_option_is_a_slip(
    program: Callable[[], None],
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It was passed over: a node ran unrecorded, a request was looked for nowhere."""
    monkeypatch.setattr(sys, "argv", ["x", *arguments])
    assert refused(capsys, program) == f"{said}: is empty: give a value, or leave it out\n"


def test_a_slip_in_a_variable_is_told_by_every_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`pd status` asked the default node instead."""
    monkeypatch.setattr(sys, "argv", ["pd", "status"])
    monkeypatch.setenv("PD_ADRESS", "tcp://127.0.0.1:1")
    said = refused(capsys, main)
    assert said == "pd: PD_ADRESS: is no variable of pdbus; the nearest is PD_ADDRESS\n"


def test_reads_too_large_to_measure_are_the_sizes_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pd", "bench", "transfer", "--sizes", "100TiB"])
    assert refused(capsys, main).startswith("pd: --sizes: reads of 109951162777600 bytes need ")
