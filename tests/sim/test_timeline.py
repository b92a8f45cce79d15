"""What stands on the timeline of a simulated cluster, compared with its recordings."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pdbus.bus.errors import ConfigError
from pdbus.nodes.replay.cluster_run import ClusterRun
from pdbus.nodes.replay.files import opened
from pdbus.nodes.replay.show import show_all, show_request
from pdbus.nodes.replay.timeline import page as page_module
from pdbus.nodes.replay.timeline.page import page, timeline

from .cluster_sim import Fault, Plan
from .cluster_world import S
from .recorded import record

ROW, BEGIN, END, REQUEST, NAME, DETAILS, ENDED, FAILED, PARTS = range(9)
FAULTY = Plan(requests=8, faults=(Fault("worker", "d1", 3 * S // 2), Fault("crash", "p2", 5 * S // 4)), slow_reads=0.2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        record(5, folder, patch, FAULTY)
    return folder


@pytest.fixture(scope="module")
def drawn(folder: Path) -> dict[str, Any]:
    return timeline(opened([folder]).recordings)


def bars(drawn: dict[str, Any], group: str) -> list[list[Any]]:
    return [bar for node in drawn["nodes"] for g in node["groups"] if g["name"] == group for bar in g["bars"]]


def test_every_request_and_lease_is_a_bar_that_ends_as_it_did(drawn: dict[str, Any], folder: Path) -> None:
    runs = ClusterRun([folder]).runs
    leases: Counter[str] = sum((run.leases or Counter() for run in runs), Counter())
    leases["not ended"] = leases.pop("held at the end", 0)
    assert Counter(bar[ENDED] for bar in bars(drawn, "leases")) == +leases
    requests: Counter[str] = sum((run.requests or Counter() for run in runs), Counter())
    ended = Counter(bar[ENDED].split()[0] for bar in bars(drawn, "requests") if bar[ENDED] != "not ended")
    assert ended == requests


def test_a_remote_request_is_fetched_confirmed_and_decoded(drawn: dict[str, Any]) -> None:
    done = [b for b in bars(drawn, "requests") if "prefilled on" in b[DETAILS] and b[ENDED] == "length"]
    kinds = [[kind for _, kind in bar[PARTS]] for bar in done]
    assert ["waiting", "fetch", "confirm", "decode"] in kinds
    request = next(bar for bar, parts in zip(done, kinds, strict=True) if parts[1:] == ["fetch", "confirm", "decode"])
    for group in ("reads", "leases", "chunks"):
        (mine, *_) = [bar for bar in bars(drawn, group) if bar[REQUEST] == request[REQUEST]]
        assert request[BEGIN] <= mine[BEGIN] <= mine[END] <= request[END], group


def test_faults_are_marked_where_they_were_noticed(drawn: dict[str, Any]) -> None:
    marks = {node["name"]: [label for _, kind, label in node["marks"] if kind == "fault"] for node in drawn["nodes"]}
    assert any("worker lost" in label for label in marks["d1"])
    lives = [node for node in drawn["nodes"] if node["name"] == "p2"]
    assert len(lives) == 2


def test_bars_of_a_row_do_not_overlap(drawn: dict[str, Any]) -> None:
    for node in drawn["nodes"]:
        for group in node["groups"]:
            ends: dict[int, int] = {}
            for bar in sorted(group["bars"], key=lambda b: b[BEGIN]):
                assert ends.get(bar[ROW], 0) <= bar[BEGIN]
                ends[bar[ROW]] = bar[END]
            assert group["rows"] == max(ends) + 1


def test_messages_go_forward_and_those_that_nobody_heard_say_so(drawn: dict[str, Any]) -> None:
    heard = [m for m in drawn["messages"] if m[2] >= 0]
    assert len(heard) > 20 and all(m[1] <= m[3] for m in heard)
    assert all(m[6] for m in drawn["messages"] if m[2] < 0)


def test_a_page_has_its_data_and_nothing_from_elsewhere(folder: Path) -> None:
    text = page(opened([folder]).recordings, ["a <note>"], "ab")
    data = json.loads(re.findall(r'<script type="application/json" id="data">(.*)</script>', text)[0])
    assert (data["notes"], data["chosen"]) == (["a <note>"], "ab")
    assert "Content-Security-Policy" in text and "default-src 'none'" in text
    assert not re.search(r"https?://|src=|@import|url\(", text)


def test_too_many_bars_are_said_to_be(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "BARS_MAX", 10)
    shown = timeline(opened([folder]).recordings)
    assert shown["notes"][0].startswith("only 10 of ")
    assert sum(len(g["bars"]) for node in shown["nodes"] for g in node["groups"]) == 10


def test_a_page_is_written_for_all_or_with_one_request_chosen(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "page.html"
    assert show_all([folder], file) == 0
    assert '"chosen":""' in file.read_text()
    assert show_request(b"request 3".hex(), [folder], file) == 0
    assert f'"chosen":"{b"request 3".ljust(16, b".").hex()}"' in file.read_text()
    assert capsys.readouterr().out == f"{file}: open it in a browser\n" * 2
    assert show_request("ffff", [folder], tmp_path / "none.html") == 1
    assert not (tmp_path / "none.html").exists()


def test_a_page_that_cannot_be_written_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--html: cannot write"):
        show_all([folder], tmp_path / "none" / "page.html")
