"""The shells of two vLLM servers' connectors, with real sockets, movers and NIXL, but no vLLM: bytes written into one
slab are found in the other."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pdbus.bus.client import Client
from pdbus.bus.errors import ConfigError, RequestError
from pdbus.bus.key_folder import KeyFolder
from pdbus.bus.messages import LedgerReply
from pdbus.bus.ports import free_port
from pdbus.bus.wire import replace
from pdbus.connector.layout import geometry_for, layout_of
from pdbus.connector.slab import Slab
from pdbus.connector.vllm import control as control_module
from pdbus.connector.vllm.control import Control
from pdbus.connector.vllm.events import KvWanted, PromptCame, PromptSaved, RequestLeft
from pdbus.connector.vllm.model import KvShape
from pdbus.connector.vllm.settings import Settings
from pdbus.connector.vllm.wants import WantState
from pdbus.nodes.replay.cluster_run import ClusterRun

from tests.key_folders import key_folder, listens

pytestmark = pytest.mark.live
LAYERS = ("0", "1", "2")
GEOMETRY = geometry_for(len(LAYERS), 4, 32, 32, "float32")
BLOCK_BYTES = layout_of(GEOMETRY, 1).region_bytes  # of all ranks


def shape(tp: int = 1) -> KvShape:
    geometry = replace(GEOMETRY, tp=tp)
    return KvShape(
        geometry=geometry, page_bytes=layout_of(geometry, 1).region_bytes // len(LAYERS), layers=LAYERS,
        fingerprint="w", model="m", max_model_len=512,
    )  # fmt: skip


SHAPE = shape()
TOKENS, DIGEST = 100, b"d" * 16
WAIT_S = 60


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def shares(control: Control) -> Iterator[tuple[Slab, int, slice]]:
    """Each rank's slab, what a block of a layer takes there, and which part of all heads that is."""
    size = BLOCK_BYTES // len(LAYERS) // len(control.slabs)
    for rank, at in enumerate(control.slabs):
        slab = Slab.open(at.path, at.size_bytes)
        yield slab, size, slice(rank * size, (rank + 1) * size)
        slab.close()


def places(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Page by page: its place among all pages of these blocks, and in a slab."""
    for number, block in enumerate(blocks):
        for layer in range(len(LAYERS)):
            yield number * len(LAYERS) + layer, block * len(LAYERS) + layer


def put(control: Control, blocks: Sequence[int], content: bytes) -> None:
    """As the workers of all ranks save it: of each page the heads that a rank has."""
    whole = BLOCK_BYTES // len(LAYERS)
    for slab, size, share in shares(control):
        for at, there in places(blocks):
            page = content[at * whole : (at + 1) * whole]
            slab.memory[there * size : (there + 1) * size] = page[share]


def taken(control: Control, blocks: Sequence[int]) -> bytes:
    """What the workers of all ranks would load."""
    pages: dict[int, bytes] = {}
    for slab, size, _ in shares(control):
        for at, there in places(blocks):
            pages[at] = pages.get(at, b"") + bytes(slab.memory[there * size : (there + 1) * size])
    return b"".join(pages[at] for at in sorted(pages))


class Two(NamedTuple):
    p: Control
    d: Control

    def came(self, request: str, pair: bytes) -> bytes:
        """A prompt is computed on the prefill server. Returns its bytes in the slab."""
        self.p.tell(PromptCame(request=request, pair=pair, prompt_tokens=TOKENS, prompt_digest=DIGEST))
        blocks = self.p.prompt_blocks(request)
        written = secrets.token_bytes(len(blocks) * BLOCK_BYTES)
        put(self.p, blocks, written)
        self.p.tell(PromptSaved(request=request, ready=TOKENS))
        return written if blocks else b""

    def fetched(self, request: str, pair: bytes) -> bytes | None:
        """What the decode server has of it in its slab; None if it has to compute it."""
        number = secrets.token_bytes(16)
        self.d.tell(
            KvWanted(request=request, id=number, pair=pair, node="", prompt_tokens=TOKENS, prompt_digest=DIGEST, have=0)
        )
        while (want := self.d.want(request)) is not None and want.state is WantState.FETCHING:
            self.d.rest()  # as vLLM's scheduler does
        read = None
        assert want is not None
        if want.state is WantState.READY:
            read = taken(self.d, want.blocks)
        self.d.tell(RequestLeft(request=request))
        return read

    def handed_over(self) -> bool:
        pair, name = secrets.token_bytes(16), secrets.token_hex(4)
        written = self.came(name, pair)
        read = self.fetched(name, pair)
        self.p.tell(RequestLeft(request=name))
        assert read is None or read == written
        return read is not None


def settings(role: str, **more: object) -> Settings:
    defaults = {"listen": "tcp://127.0.0.1:0", "kv_memory_mib": 2, "pair_wait_s": 1, "park_s": 0.5}
    return Settings(role=role, name=f"vllm-{role}", **{**defaults, **more})  # type: ignore[arg-type]


@contextmanager
def both(prefill: int = 1, decode: int = 1) -> Iterator[Two]:
    """Of so many ranks."""
    p = Control(settings("prefill"), shape(prefill))
    p.start()
    d = Control(settings("decode", join=(p.address,)), shape(decode))
    try:
        d.start()
        made = Two(p, d)
        until(made.handed_over)
        yield made
    finally:
        d.stop()
        p.stop()


@pytest.fixture(scope="module")
def two() -> Iterator[Two]:
    with both() as made:
        yield made


def test_bytes_arrive_as_they_were(two: Two) -> None:
    assert two.handed_over()


def test_a_tool_is_told_how_a_server_stands(two: Two) -> None:
    """`pd status` and `pd status --ledger`, while a prompt waits for its reader and after."""
    pair = secrets.token_bytes(16)
    two.came("kept", pair)
    said, _ = told(two.p)
    assert (said["name"], said["role"], said["engine"], said["ready"]) == ("vllm-prefill", "prefill", "vllm", True)
    assert [(p["name"], p["state"]) for p in said["peers"]] == [("vllm-decode", "up")]
    (kept,) = [r for r in said["requests"] if r["vllm_request"] == "kept"]
    assert (kept["state"], kept["prompt_tokens"]) == ("computed", TOKENS)
    assert pair.hex() not in str(said)
    assert (said["pids"]["mover"], said["ranks"]) == (two.p.mover_pids[0], [{"mover": two.p.mover_pids[0]}])
    assert told(two.d)[0]["ready"]
    two.p.tell(RequestLeft(request="kept"))
    until(lambda: told(two.p)[1].clean and told(two.d)[1].clean)


def test_a_rest_ends_when_kv_is_there_or_will_not_come(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    for bound in ("REST_S", "REST_MAX_S"):
        monkeypatch.setattr(control_module, bound, threading.TIMEOUT_MAX)
    assert two.handed_over()  # the bound holds from the next rest on
    assert two.handed_over()
    assert two.fetched("lone", secrets.token_bytes(16)) is None  # nobody has that pair


def test_what_only_a_node_does_is_refused_in_words(two: Two) -> None:
    async def ask() -> None:
        async with Client(two.d.address) as client:
            await client.connect(["tcp://127.0.0.1:1"])

    with pytest.raises(RequestError, match="vllm-decode is a vLLM server: it does not take connect"):
        asyncio.run(ask())


def told(control: Control) -> tuple[dict[str, Any], LedgerReply]:
    async def ask() -> tuple[dict[str, Any], LedgerReply]:
        async with Client(control.address) as client:
            return await client.status(), await client.ledger()

    return asyncio.run(ask())


@pytest.mark.long
@pytest.mark.parametrize("side", ["p", "d"])
def test_a_mover_that_is_killed_is_replaced(two: Two, side: str) -> None:
    control: Control = getattr(two, side)
    os.kill(control.mover_pids[0], signal.SIGKILL)
    until(two.handed_over)


@pytest.mark.long
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 2), (4, 2)])
def test_ranks_of_another_number_find_their_heads(prefill: int, decode: int) -> None:
    """A mover of one rank that is killed fails what is read, and all ranks go on under a new epoch."""
    with both(prefill, decode) as made:
        assert made.handed_over()
        for control in made:
            before = control.mover_pids
            os.kill(before[-1], signal.SIGKILL)
            while not made.handed_over() or any(pid in before for pid in control.mover_pids):
                time.sleep(0.005)


def test_an_address_that_is_taken_is_named(two: Two) -> None:
    control = Control(settings("prefill", listen=two.p.address), SHAPE)
    with pytest.raises(ConfigError, match="listen"):
        control.start()


def test_a_slab_for_less_than_two_blocks_is_named() -> None:
    big = KvShape(
        geometry=geometry_for(64, 8, 128, 128, "float32"), page_bytes=1 << 20, layers=(), fingerprint="w", model="m",
        max_model_len=512,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="kv_memory_mib"):
        Control(settings("prefill"), big)


def test_after_its_end_nothing_is_handed_over_and_nothing_raises() -> None:
    control = Control(settings("prefill"), SHAPE)
    control.start()
    control.stop()
    control.tell(PromptCame(request="r", pair=b"p" * 16, prompt_tokens=4, prompt_digest=DIGEST))
    assert control.prompt_blocks("r") == ()
    assert control.want("r") is None
    control.stop()


# ---------------------------------------------------------------- keys, recordings


def keys(path: Path) -> KeyFolder:
    """Of both servers. Where they listen is known only once they do."""
    return key_folder(path, {"vllm-prefill": "prefill", "vllm-decode": "decode"})


@contextmanager
def started(folder: Path, more: dict[str, dict[str, object]] | None = None) -> Iterator[Two]:
    """Two with keys, and with recordings beside these."""
    folder_of_keys = keys(folder / "keys")
    same: dict[str, object] = {"keys": str(folder_of_keys.path), "record": str(folder / "recordings")}
    address = f"tcp://127.0.0.1:{free_port('127.0.0.1', 26_000)}"
    listens(folder_of_keys, "vllm-prefill", address)
    p = Control(settings("prefill", listen=address, **same), SHAPE)
    p.start()
    d = Control(settings("decode", join=(address,), **{**same, **(more or {}).get("d", {})}), SHAPE)
    try:
        d.start()
        yield Two(p, d)
    finally:
        d.stop()
        p.stop()


@pytest.mark.long
def test_with_keys_kv_is_handed_over_and_what_was_recorded_verifies(tmp_path: Path) -> None:
    with started(tmp_path) as two:
        until(two.handed_over)
    run = ClusterRun([tmp_path / "recordings"])
    assert [finding.text for finding in run.failures] == []
    assert [(r.again, r.ended) for r in run.runs] == [(True, "shut down")] * 2


@pytest.mark.long
def test_whose_key_is_revoked_gets_nothing_more(tmp_path: Path) -> None:
    with started(tmp_path) as two:
        until(two.handed_over)
        theirs = KeyFolder(tmp_path / "keys").allowed().named("vllm-decode")[-1]
        KeyFolder(tmp_path / "keys").revoke(theirs)
        until(lambda: not two.handed_over())


def test_without_its_key_a_server_does_not_start(tmp_path: Path) -> None:
    folder = key_folder(tmp_path, {"somebody": "decode"})
    with pytest.raises(ConfigError, match=r"kv_connector_extra_config.keys"):
        Control(settings("decode", keys=str(folder.path)), SHAPE).start()


def test_a_key_of_the_other_role_is_refused(tmp_path: Path) -> None:
    folder = key_folder(tmp_path, {"vllm-decode": "prefill"})
    with pytest.raises(ConfigError, match="cannot run a decode node"):
        Control(settings("decode", keys=str(folder.path)), SHAPE).start()
