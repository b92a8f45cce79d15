"""What a mover does when NIXL cannot register its memory: nothing is left registered, and the message helps."""

from __future__ import annotations

import resource
from types import SimpleNamespace
from typing import Any

import pytest

from pdbus.bus.errors import ConfigError
from pdbus.bus.wire import to_json
from pdbus.connector import mover, nixl_agent
from pdbus.connector.ipc import MoverArgs, MoverFailed
from pdbus.connector.layout import geometry_for, layout_of
from pdbus.connector.nixl_agent import NixlAgent
from pdbus.connector.slab import Slab

LIMIT = 1 << 20  # bytes that this NIXL will register


class Nixl:
    """An agent of NIXL's that can register so much and no more."""

    def __init__(self, *_: Any) -> None:
        self.registered: list[int] = []

    def register_memory(self, regions: list[tuple[int, int, int, str]], kind: str) -> int:
        size = sum(size for _, size, _, _ in regions)
        if size > LIMIT:
            raise RuntimeError("NIXL_ERR_BACKEND")
        self.registered.append(size)
        return size

    def deregister_memory(self, handle: int) -> None:
        self.registered.remove(handle)

    def get_agent_metadata(self) -> bytes:
        return b"metadata"


@pytest.fixture
def nixl(monkeypatch: pytest.MonkeyPatch) -> Nixl:
    agent = Nixl()
    api = SimpleNamespace(__package__="fake", nixl_agent=lambda *_: agent, nixl_agent_config=lambda **_: None)
    monkeypatch.setattr(nixl_agent, "load_flavour", lambda: api)
    monkeypatch.setattr(nixl_agent.importlib, "import_module", lambda name: SimpleNamespace())
    return agent


def limited(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(nixl_agent.resource, "getrlimit", lambda which: (limit, limit))


def test_a_region_that_cannot_be_registered_leaves_none_registered(nixl: Nixl, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, 65_536)
    with pytest.raises(ConfigError) as raised:
        NixlAgent("a", 4096, 2 * LIMIT)
    assert nixl.registered == []
    assert str(raised.value) == (
        f"--kv-memory: NIXL cannot register {2 * LIMIT} bytes of memory (NIXL_ERR_BACKEND); the limit on locked memory "
        "is 65536 bytes (`ulimit -l`): raise it, or give less memory"
    )


def test_without_a_limit_none_is_blamed(nixl: Nixl, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, resource.RLIM_INFINITY)
    with pytest.raises(ConfigError, match=r"is not limited \(`ulimit -l`\): give less memory"):
        NixlAgent("a", 4096, 2 * LIMIT)


def test_an_agent_that_ends_has_nothing_registered(nixl: Nixl) -> None:
    agent = NixlAgent("a", 4096, LIMIT)
    assert len(nixl.registered) == 2  # a page where first reads land, too
    agent.close()
    assert nixl.registered == []


def test_the_mover_says_which_setting_and_exits_with_2(nixl: Nixl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control passes it on as its own error: one line, the setting in it."""
    said: list[Any] = []
    channel = SimpleNamespace(send=said.append, close=lambda: None)
    monkeypatch.setattr(mover, "ChildChannel", lambda *_: channel)
    layout = layout_of(geometry_for(1, 1, 1024, 16, "float32"), 2 * LIMIT // (2 * 16 * 4096))
    slab = Slab.create(2 * LIMIT)
    args = MoverArgs(endpoint="", slab_path=slab.path, slab_bytes=2 * LIMIT, layout=layout, rank=0, agent_name="a")
    try:
        assert mover.main(["mover", to_json(args).decode()]) == 2
    finally:
        slab.close()
    (failed,) = said
    assert isinstance(failed, MoverFailed) and failed.setting == "--kv-memory" and str(2 * LIMIT) in failed.problem
