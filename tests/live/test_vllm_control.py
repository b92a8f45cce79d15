"""The shells of two vLLM servers' connectors, with real sockets, movers and NIXL, but no vLLM: bytes written into one
slab are found in the other."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from pdbus.bus.errors import ConfigError
from pdbus.connector.layout import geometry_for, rank_block_bytes
from pdbus.connector.slab import Slab
from pdbus.connector.vllm.control import Control
from pdbus.connector.vllm.events import KvWanted, PromptCame, PromptSaved, RequestLeft
from pdbus.connector.vllm.model import KvShape
from pdbus.connector.vllm.settings import Settings
from pdbus.connector.vllm.wants import WantState

pytestmark = pytest.mark.live
GEOMETRY = geometry_for(3, 2, 32, 32, "float32")
BLOCK_BYTES = rank_block_bytes(GEOMETRY)
SHAPE = KvShape(
    geometry=GEOMETRY, page_bytes=BLOCK_BYTES // 3, layers=("0", "1", "2"), fingerprint="w", model="m",
    max_model_len=512,
)  # fmt: skip
TOKENS, DIGEST = 100, b"d" * 16
WAIT_S = 60


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)  # as vLLM's own loop does


class Two(NamedTuple):
    p: Control
    d: Control

    def came(self, request: str, pair: bytes) -> bytes:
        """A prompt is computed on the prefill server. Returns its bytes in the slab."""
        self.p.tell(PromptCame(request=request, pair=pair, prompt_tokens=TOKENS, prompt_digest=DIGEST))
        slab = Slab.open(self.p.slab_at.path, self.p.slab_at.size_bytes)
        written = b""
        for block in self.p.prompt_blocks(request):
            content = secrets.token_bytes(BLOCK_BYTES)
            slab.memory[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = content
            written += content
        slab.close()
        self.p.tell(PromptSaved(request=request, ready=TOKENS))
        return written

    def fetched(self, request: str, pair: bytes) -> bytes | None:
        """What the decode server has of it in its slab; None if it has to compute it."""
        number = secrets.token_bytes(16)
        self.d.tell(
            KvWanted(request=request, id=number, pair=pair, node="", prompt_tokens=TOKENS, prompt_digest=DIGEST, have=0)
        )
        until(lambda: (want := self.d.want(request)) is None or want.state is not WantState.FETCHING)
        want, read = self.d.want(request), None
        assert want is not None
        if want.state is WantState.READY:
            slab = Slab.open(self.d.slab_at.path, self.d.slab_at.size_bytes)
            read = b"".join(bytes(slab.memory[b * BLOCK_BYTES : (b + 1) * BLOCK_BYTES]) for b in want.blocks)
            slab.close()
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


@pytest.fixture(scope="module")
def two() -> Iterator[Two]:
    p = Control(settings("prefill"), SHAPE)
    p.start()
    d = Control(settings("decode", join=(p.address,)), SHAPE)
    d.start()
    made = Two(p, d)
    try:
        until(made.handed_over)
        yield made
    finally:
        d.stop()
        p.stop()


def test_bytes_arrive_as_they_were(two: Two) -> None:
    assert two.handed_over()


@pytest.mark.long
def test_a_pair_that_nobody_has_is_given_up(two: Two) -> None:
    assert two.fetched("lone", secrets.token_bytes(16)) is None


@pytest.mark.long
@pytest.mark.parametrize("side", ["p", "d"])
def test_a_mover_that_is_killed_is_replaced(two: Two, side: str) -> None:
    control: Control = getattr(two, side)
    os.kill(control.mover_pid, signal.SIGKILL)
    until(two.handed_over)


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
