"""What a client records of its talk with a node, and what a verification says of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdbus.bus import Client, ConfigError, SyncClient
from pdbus.bus.endpoint import Received
from pdbus.bus.messages import Finished, Generate, Message, Token
from pdbus.bus.recording import read
from pdbus.bus.recording_part import RawRecord, Record
from pdbus.bus.wire import pack_u32, unpack_foreign
from pdbus.nodes.replay.cluster_run import ClusterRun
from pdbus.nodes.replay.findings import Kind
from pdbus.nodes.replay.show import belonging, find, load

from tests.fake_node import REQUEST, FakeNode, answer_words
from tests.loop import on_loop
from tests.recordings import rewrite, with_payload

WORDS = ["the", " secret", " word"]


async def recorded(
    folder: Path, answer: Callable[[FakeNode, Received], None] | None = None, *, late: bool = False, **options: Any
) -> Path:
    """One generation's recording; with `late` what came after its end too."""
    node = FakeNode(answer or answer_words(WORDS))
    try:
        node.bind()
        async with Client(node.address, record=folder, **options) as client:
            await client.generate("tell nobody", max_tokens=3).whole()
            if late:
                await client.status()  # comes behind everything that was said before
    finally:
        node.close()
    return next(iter(files(folder)))


def files(folder: Path) -> list[Path]:
    return list(folder.iterdir())


def kinds(path: Path) -> list[str]:
    return [record.kind for record in read(path)]


def message(path: Path, kind: str) -> Any:
    return next(record.payload["message"] for record in read(path) if record.kind == kind)


@on_loop
async def test_what_was_sent_and_got_is_recorded_in_order(tmp_path: Path) -> None:
    path = await recorded(tmp_path)
    assert kinds(path) == [
        "Sent hello", "Got welcome", "Sent generate", "Got token", "Got token", "Got token", "Got finished",
    ]  # fmt: skip
    assert path.name.startswith("client-")


@on_loop
async def test_without_record_tokens_neither_prompt_nor_answer_is_in_the_file(tmp_path: Path) -> None:
    path = await recorded(tmp_path)
    assert message(path, "Sent generate")["text"] is None
    token = message(path, "Got token")
    assert (token["text"], token["tokens"]) == ("", bytes(4)), "how many came can be seen"


@on_loop
async def test_with_record_tokens_both_are_kept(tmp_path: Path) -> None:
    path = await recorded(tmp_path, record_tokens=True)
    assert message(path, "Sent generate")["text"] == "tell nobody"
    assert message(path, "Got token")["text"] == "the"


@on_loop
async def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="record: cannot write"):
        async with Client("tcp://127.0.0.1:1", record=tmp_path / "file"):
            pass


def test_a_plain_client_records_too(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="record: cannot write"):
        SyncClient("tcp://127.0.0.1:1", record=tmp_path / "file").__enter__()


# ---------------------------------------------------------------- verified


@on_loop
async def test_a_whole_answer_verifies(tmp_path: Path) -> None:
    verified = ClusterRun([await recorded(tmp_path)])
    (run,) = verified.runs
    assert (run.is_client, run.ended, run.requests) == (True, "closed", {"stop": 1})
    assert verified.failures == []
    assert [note.text.partition(" (")[0] for note in verified.notes] == ["fake"], "its node is not there"
    assert "its side of 1 answers was not checked" in verified.notes[0].text


def say(node: FakeNode, received: Received, *messages: Message) -> None:
    for each in messages:
        node.tell(received, each)


def token(received: Received, index: int) -> Token:
    assert isinstance(received.message, Generate)
    return Token(client_id=received.message.client_id, request=REQUEST, index=index, tokens=pack_u32([7]))


def finished(received: Received, tokens: int, reason: str = "stop") -> Finished:
    assert isinstance(received.message, Generate)
    name = received.message.client_id
    return Finished(client_id=name, request=REQUEST, reason=reason, completion_tokens=tokens)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (lambda n, r: say(n, r, token(r, 0), finished(r, 2)), "ends with 2 tokens, of which 1 came"),
        (lambda n, r: say(n, r, finished(r, 0), finished(r, 0)), "ends a second time"),
        (lambda n, r: say(n, r, finished(r, 0), token(r, 0)), "is given tokens after its end"),
    ],
)
@on_loop
async def test_a_wrong_answer_is_found(
    answer: Callable[[FakeNode, Received], None], problem: str, tmp_path: Path
) -> None:
    path = await recorded(tmp_path, answer, late=True)
    failures = ClusterRun([path]).failures
    assert {f.kind for f in failures} == {Kind.VIOLATION}
    assert problem in failures[0].text


@on_loop
async def test_a_token_that_never_came_is_found(tmp_path: Path) -> None:
    """The client itself ends such an answer; the recording says what was missing."""
    path = await recorded(tmp_path)

    def later(record: RawRecord) -> RawRecord:
        return changed_message(record, index=2) if record.kind == "Got token" and record.sequence == 5 else record

    rewrite(path, later)
    assert [f.text for f in ClusterRun([path]).failures] == [f"tokens 1 to 1 of request {REQUEST.hex()} never came"]


def changed_message(record: RawRecord, **changes: Any) -> RawRecord:
    return with_payload(record, message={**unpack_foreign(bytes(record.payload))["message"], **changes})


@on_loop
async def test_show_follows_a_request_into_its_clients_recording(tmp_path: Path) -> None:
    path = await recorded(tmp_path)
    moments, _ = load([path])
    (request,) = find(moments, REQUEST.hex()[:6])
    records: list[Record] = [moment.record for moment in belonging(moments, request)]
    assert [record.kind.partition(" ")[2] for record in records] == ["generate", "token", "token", "token", "finished"]
