"""A node's tokenizer at the other end of the bus says the same."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest

import pdbus.nodes.tokenizer_files as files
from pdbus.bus.client import Client
from pdbus.bus.errors import Broken, RequestError
from pdbus.bus.messages import FetchTokenizerReply
from pdbus.bus.wire import replace
from pdbus.nodes.tokenizer import ByteTokenizer, HFTokenizer, Tokenizer

from tests.tokenizers_made import byte_level

TEXT = "The sea is a place of endless wonder."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    byte_level().save(str(made / "tokenizer.json"))
    (made / "config.json").write_text('{"eos_token_id": 1}')
    return made


class Node:
    """Answers like a node of that folder; `spoil` changes what it says."""

    def __init__(self, folder: str, **spoil: object) -> None:
        self._folder, self._spoil = folder, spoil

    async def tokenizer(self, part: int = 0) -> FetchTokenizerReply:
        return replace(files.tokenizer_part(self._folder, 256, part), **self._spoil)


def fetched(node: Node) -> Tokenizer:
    return asyncio.run(files.fetch_tokenizer(cast(Client, node)))


@pytest.mark.parametrize("part_bytes", [100, 1 << 20])
def test_a_hugging_face_tokenizer_comes_over_in_parts(
    folder: Path, part_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PART_BYTES", part_bytes)
    monkeypatch.setattr(files, "PARTS_MAX", 1 << 20)
    here, there = HFTokenizer(folder), fetched(Node(str(folder)))
    assert there.encode(TEXT) == here.encode(TEXT)
    assert there.eos_ids == here.eos_ids == (1,)


def test_the_byte_tokenizer_needs_no_data() -> None:
    tokenizer = fetched(Node(""))
    assert isinstance(tokenizer, ByteTokenizer)
    assert tokenizer.encode("ab") == [97, 98]


@pytest.mark.parametrize("spoil", [{"digest": bytes(16)}, {"tokenizer": "other"}, {"parts": 10**6}])
def test_what_is_not_whole_or_not_known_is_not_used(folder: Path, spoil: dict[str, object]) -> None:
    with pytest.raises(Broken, match="its tokenizer"):
        fetched(Node(str(folder), **spoil))


def test_a_part_that_there_is_not_is_named(folder: Path) -> None:
    with pytest.raises(RequestError, match="part: there are 1 from 0, got 7"):
        files.tokenizer_part(str(folder), 256, 7)


def test_a_folder_that_cannot_be_read_any_more_is_the_asker_s_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not the end of the node, which has read it long ago."""

    def gone(_: Path) -> bytes:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(Path, "is_file", lambda _: True)
    monkeypatch.setattr(Path, "read_bytes", gone)
    with pytest.raises(Broken, match="cannot be read: Too many open files"):
        files.tokenizer_part("/a/model", 256, 0)
