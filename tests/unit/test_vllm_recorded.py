"""Recordings of vLLM servers: run again and checked like our own nodes'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdbus.bus.errors import ConfigError
from pdbus.bus.messages import LeaseId, LeaseReleased, PrefillProgress, PrefillRequest, Sampling, TryId
from pdbus.bus.recording_part import RawRecord
from pdbus.bus.wire import Header, pack_u32
from pdbus.connector import events as ev
from pdbus.connector.vllm.events import KvWanted, PromptCame, PromptSaved, RequestLeft
from pdbus.connector.vllm.recording import recorder
from pdbus.connector.vllm.settings import WHERE
from pdbus.nodes.replay.check_prompts import PromptCheck
from pdbus.nodes.replay.check_wants import WantCheck
from pdbus.nodes.replay.checks import Check, Checks, Report
from pdbus.nodes.replay.cluster_run import ClusterRun
from pdbus.nodes.replay.importers import import_workload
from pdbus.nodes.replay.turns import Turn
from pdbus.nodes.replay.verify import verify

from tests.recordings import failures_of, rewrite, with_payload
from tests.vllm_cores import DIGEST, PAIR, PROMPT, S, Two

Story = Callable[[Two], None]


def handed_over(two: Two) -> None:
    two.came()
    two.saved(6)
    two.wanted()
    two.saved()
    while two.reads:
        two.read()
    two.left(two.d, "D")
    two.left(two.p, "P")


def asked_first(two: Two) -> None:
    two.wanted()
    two.wait(3)
    handed_over(two)


def never_heard_of(two: Two) -> None:
    two.wanted()
    two.wait(20)
    two.left(two.d, "D")


def reads_fail(two: Two) -> None:
    two.came()
    two.wanted()
    two.saved()
    two.read(problem="cut")
    two.left(two.d, "D")
    two.left(two.p, "P")


def expires(two: Two) -> None:
    two.came()
    two.wanted()
    two.saved()
    two.wait(100)


def prompt_is_dropped(two: Two) -> None:
    two.wanted()
    two.came()
    two.saved(6)
    two.left(two.p, "P")


def mover_is_lost(two: Two) -> None:
    two.came()
    two.wanted()
    two.saved()
    two.tell(two.p, ev.MoverLost(problem="killed", asked=False))
    two.tell(two.d, ev.MoverLost(problem="killed", asked=False))


STORIES = [handed_over, asked_first, never_heard_of, reads_fail, expires, prompt_is_dropped, mover_is_lost]


def recorded(folder: Path, story: Story, *, leave: bool = True) -> list[Path]:
    two = Two(record=folder)
    story(two)
    if leave:
        for server in (two.d, two.p):
            two.tell(server, ev.LeaveAsked())
    return two.recordings()


@pytest.mark.parametrize("story", STORIES)
def test_a_pair_is_run_again_and_found_right(tmp_path: Path, story: Story) -> None:
    recorded(tmp_path, story)
    run = ClusterRun([tmp_path])
    assert [f.text for f in run.failures] == []
    assert [r.again for r in run.runs] == [True, True]
    assert [r.ended for r in run.runs] == ["shut down", "shut down"]


def test_its_verdict_counts_hand_overs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path, handed_over)
    assert verify([tmp_path]) == 0
    said = capsys.readouterr().out
    assert "1 requests (1 fetched)" in said and "1 leases (1 done)" in said


def changed(folder: Path, kind: str, **changes: object) -> list[str]:
    """What is found when the first record of a kind says something else; each server's recording taken alone."""
    found: list[str] = []
    for path in recorded(folder, handed_over):
        done: list[RawRecord] = []

        def change(record: RawRecord, done: list[RawRecord] = done) -> RawRecord:
            if record.kind == kind and not done:
                done.append(record)
                return with_payload(record, **changes)
            return record

        rewrite(path, change)
        found += [f"{f.kind.value}: {f.text}" for f in failures_of(path)]
    return found


def test_an_input_that_is_changed_is_a_divergence(tmp_path: Path) -> None:
    assert any(f.startswith("divergence") for f in changed(tmp_path, "PromptSaved", ready=5))


# ---------------------------------------------------------------- the checks themselves


class Told:
    """What a check reports of turns that are made up."""

    def __init__(self, make: Callable[[Report], Check]) -> None:
        self.texts: list[str] = []
        self._checks = Checks([make(lambda turn, rule, text: self.texts.append(text))])
        self._turns = 0

    def turn(self, event: Any, *effects: ev.NodeEffect, now: int = 0) -> list[str]:
        self._turns += 1
        self._checks.turn(Turn(self._turns, now, event, list(effects)))
        return self.texts


WANTED = KvWanted(request="r", id=b"i" * 16, pair=PAIR, node="", prompt_tokens=PROMPT, prompt_digest=DIGEST, have=0)
FETCHED = ev.Publish(topic="request", event="kv.fetched", data={"request": WANTED.id.hex()})
FAILED = ev.Publish(topic="request", event="attempt.failed", data={"request": WANTED.id.hex()})
TRY = TryId(node="d", incarnation=b"d" * 16, request=WANTED.id, attempt=1)
LEASE = LeaseId(node="p", incarnation=b"p" * 16, epoch=1, generation=1)


def came(message: Any) -> ev.MessageCame[Any]:
    header = Header(from_="x", from_inc=b"x" * 16, to="", to_inc=b"", seq=1, cause=0)
    return ev.MessageCame(link="l", header=header, message=message)


def sent(message: Any) -> ev.Send[Any]:
    return ev.Send(link="l", to="x", to_inc=b"", message=message)


def test_kv_that_nothing_confirms_must_not_count() -> None:
    told = Told(lambda report: WantCheck(report, S))
    told.turn(WANTED)
    refused = LeaseReleased(try_=TRY, lease=LEASE, valid=False)
    assert "nothing confirms" in told.turn(came(refused), FETCHED)[0]


def test_kv_that_is_confirmed_counts_once() -> None:
    told = Told(lambda report: WantCheck(report, S))
    told.turn(WANTED)
    confirmed = came(LeaseReleased(try_=TRY, lease=LEASE, valid=True))
    assert told.turn(confirmed, FETCHED) == []
    assert "without waiting" in told.turn(confirmed, FETCHED)[0]


def test_a_request_that_waits_on_and_on_is_found() -> None:
    told = Told(lambda report: WantCheck(report, S))
    told.turn(WANTED)
    assert "beyond its time" in told.turn(ev.Tick(), now=S + 1)[0]


@pytest.mark.parametrize("end", [RequestLeft(request="r"), ev.Tick()])
def test_a_request_that_is_over_waits_no_more(end: Any) -> None:
    told = Told(lambda report: WantCheck(report, S))
    told.turn(WANTED)
    told.turn(end, *([FAILED] if isinstance(end, ev.Tick) else []))
    assert told.turn(ev.Tick(), now=9 * S) == []


def asks(try_: TryId = TRY, pair: bytes = PAIR) -> ev.MessageCame[Any]:
    return came(
        PrefillRequest(
            try_=try_, sampling=Sampling(), have=0, deadline_ms=9, prompt_tokens=PROMPT, prompt_digest=DIGEST, pair=pair
        )
    )


def announces(blocks: tuple[int, ...], ready: int, try_: TryId = TRY) -> ev.Send[Any]:
    return sent(PrefillProgress(try_=try_, lease=LEASE, ready=ready, blocks=pack_u32(blocks)))


def test_kv_that_was_never_copied_must_not_be_announced() -> None:
    told = Told(PromptCheck)
    told.turn(PromptCame(request="r", pair=PAIR, prompt_tokens=PROMPT, prompt_digest=DIGEST))
    told.turn(asks())
    assert told.turn(PromptSaved(request="r", ready=4), announces((5,), 4)) == []
    assert "only 4 were copied" in told.turn(ev.Tick(), announces((5, 6), 8))[0]


def test_blocks_of_two_leases_are_not_the_same() -> None:
    told = Told(PromptCheck)
    other = TryId(node="d", incarnation=b"d" * 16, request=b"o" * 16, attempt=1)
    for name, pair, try_ in (("r", PAIR, TRY), ("s", b"q" * 16, other)):
        told.turn(PromptCame(request=name, pair=pair, prompt_tokens=PROMPT, prompt_digest=DIGEST))
        told.turn(PromptSaved(request=name, ready=4))
        told.turn(asks(try_, pair), announces((5,), 4, try_))
    assert "under another lease" in told.texts[0]


# ---------------------------------------------------------------- elsewhere


def test_it_holds_no_requests_of_clients_to_be_played_again(tmp_path: Path) -> None:
    recorded(tmp_path, handed_over)
    with pytest.raises(ConfigError):
        import_workload(tmp_path, "recording")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    core = Two().p.core
    with pytest.raises(ConfigError, match=f"{WHERE}.record"):
        recorder(tmp_path / "file", core.config, Two().p.membership, setting=f"{WHERE}.record")
