"""A node's recording: whole enough to run again, and without tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdbus.bus.messages import (
    FirstToken,
    Goodbye,
    LeaseId,
    LeaseRenewed,
    PrefillRequest,
    RenewedEntry,
    Sampling,
    TryId,
)
from pdbus.bus.recording import read
from pdbus.bus.wire import Header, encode, replace
from pdbus.connector.recording import kind_of
from pdbus.nodes import events as ev
from pdbus.nodes.recording import CoreBegan
from pdbus.nodes.replay.cluster_run import ClusterRun
from pdbus.nodes.replay.turns import began, effect_of, event_of

from .recorded_node import SIZE, RecordedNode

TOKEN = encode(FirstToken(token=77))
REQUEST = b"R" * 16
TRY = TryId(node="d", incarnation=b"d" * 16, request=REQUEST, attempt=1)
LEASE = LeaseId(node="p", incarnation=b"p" * 16, epoch=1, generation=1)


def test_at_the_head_stands_all_that_the_core_was_made_of(tmp_path: Path) -> None:
    node = RecordedNode(tmp_path)
    made, understood = began(read(node.close()))
    assert understood
    assert made.core == node.core.config
    assert made.membership.hello.address == "tcp://d:1"


def test_an_input_stands_before_what_was_decided(tmp_path: Path) -> None:
    node = RecordedNode(tmp_path)
    node.hear(ev.JoinAsked(address="tcp://p:1"))
    kinds = [(r.sequence, r.cause, r.kind) for r in read(node.close())]
    assert kinds == [(1, 0, "JoinAsked"), (2, 1, "OpenLink")]


def test_the_input_that_breaks_a_core_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = RecordedNode(tmp_path)
    monkeypatch.setattr(node.core.peers, "tick", lambda now: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        node.hear(ev.Tick())
    *_, tick, raised = read(node.close())
    assert (tick.kind, raised.kind, raised.cause) == ("Tick", "CoreRaised", tick.sequence)
    assert raised.payload["problem"] == "ZeroDivisionError: integer division or modulo by zero"


def test_a_message_is_read_back_typed(tmp_path: Path) -> None:
    """Its own encoding is its body alone: its kind stands in the record's."""
    node = RecordedNode(tmp_path)
    node.hear_message("p", Goodbye(reason="done"))
    record = next(iter(read(node.close()).raw()))
    assert record.kind == "MessageCame goodbye"
    event = event_of(record)
    assert isinstance(event, ev.MessageCame) and type(event) is ev.MessageCame
    assert event.message == Goodbye(reason="done")


@pytest.mark.parametrize("effect", [ev.Send(link="l", to="p", to_inc=b"", message=Goodbye()), ev.Drained()])
def test_a_kind_names_type_and_message(effect: ev.NodeEffect) -> None:
    assert kind_of(effect) in ("Send goodbye", "Drained")


# ---------------------------------------------------------------- tokens


def prefilled(folder: Path, *, tokens: bool) -> Path:
    """A prefill node samples a first token and says it twice."""
    node = RecordedNode(folder, "p", "prefill", tokens=tokens)
    node.come_up()
    node.hear_message("d", replace(node.hello, role="decode"))
    asked = PrefillRequest(
        try_=TRY, sampling=Sampling(), have=0, deadline_ms=9000, prompt_tokens=6, prompt_digest=b"digest"
    )
    node.hear_message("d", asked, block_hashes=(b"one",))
    node.step(payload=TOKEN)
    node.hear_message("d", asked, block_hashes=(b"one",))
    return node.close()


def test_without_record_tokens_no_token_is_in_the_file(tmp_path: Path) -> None:
    path = prefilled(tmp_path, tokens=False)
    assert TOKEN not in path.read_bytes()
    assert not began(read(path))[0].tokens


def test_a_payload_is_hidden_alike_wherever_it_stands(tmp_path: Path) -> None:
    """In what came from the worker, in both messages: so the core decides the same again."""
    records = list(read(prefilled(tmp_path, tokens=False)).raw())
    values = [event_of(r) if not r.cause else effect_of(r) for r in records]
    sampled = {row.payload for v in values if isinstance(v, ev.StepEnded) for row in v.rows}
    said = [m for v in values if isinstance(v, ev.Send) if (m := getattr(v.message, "first_token", None))]
    assert len(said) == 2
    assert sampled == set(said)
    assert len(said[0]) == 16


def test_two_recordings_hide_the_same_token_differently(tmp_path: Path) -> None:
    """Else whoever has one recording with tokens could read all others."""
    digests = []
    for name in ("a", "b"):
        for record in read(prefilled(tmp_path / name, tokens=False)):
            if record.kind == "Send prefill.done":
                digests.append(record.payload["message"]["first_token"])
    assert len(digests) == 2 and digests[0] != digests[1]


def test_the_same_token_of_two_requests_does_not_show(tmp_path: Path) -> None:
    node = RecordedNode(tmp_path, "p", "prefill")
    node.come_up()
    node.hear_message("d", replace(node.hello, role="decode"))
    for request in (b"1" * 16, b"2" * 16):
        asked = PrefillRequest(
            try_=replace(TRY, request=request),
            sampling=Sampling(), have=0, deadline_ms=9000, prompt_tokens=3, prompt_digest=b"digest",
        )  # fmt: skip
        node.hear_message("d", asked)
        node.step(payload=TOKEN)
    said = [r.payload["message"]["first_token"] for r in read(node.close()) if r.kind == "Send prefill.done"]
    assert len(set(said)) == 2


@pytest.mark.parametrize("tokens", [False, True])
def test_a_prefill_nodes_recording_runs_again(tmp_path: Path, tokens: bool) -> None:
    (run,) = ClusterRun([prefilled(tmp_path, tokens=tokens)]).runs
    assert run.again


def test_with_record_tokens_the_payload_is_kept(tmp_path: Path) -> None:
    path = prefilled(tmp_path, tokens=True)
    done = next(record for record in read(path) if record.kind == "Send prefill.done")
    assert done.payload["message"]["first_token"] == TOKEN
    assert began(read(path))[0].tokens


def test_what_a_renewal_tells_again_is_hidden_too(tmp_path: Path) -> None:
    node = RecordedNode(tmp_path)
    entries = (
        RenewedEntry(try_=TRY, held=True, lease=LEASE, ready=6, first_token=TOKEN),
        RenewedEntry(try_=TRY, held=False),
    )
    node.hear_message("p", LeaseRenewed(entries=entries))
    event = event_of(next(iter(read(node.close()).raw())))
    assert isinstance(event, ev.MessageCame)
    first, second = event.message.entries
    assert first.first_token not in (TOKEN, None) and second.first_token is None
    assert (first.lease, first.ready) == (LEASE, SIZE + 2)


def test_what_is_recorded_does_not_change_what_is_heard(tmp_path: Path) -> None:
    """The core and the shell go on with the payload itself."""
    node = RecordedNode(tmp_path, "p", "prefill")
    effects = node.hear(ev.StepEnded(step=1, rows=(ev.StepRowEnded(seq=1, payload=TOKEN),), compute_ns=1))
    assert not effects
    header = Header(from_="d", from_inc=b"x")
    event = ev.MessageCame(link="l", header=header, message=Goodbye())
    node.hear(event)
    assert event.message == Goodbye()


def test_began_names_its_version(tmp_path: Path) -> None:
    from pdbus import __version__

    made, _ = began(read(RecordedNode(tmp_path).close()))
    assert isinstance(made, CoreBegan) and made.version == __version__
