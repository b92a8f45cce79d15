"""What a node is made of: the longest request is what the KV blocks hold, whatever the model could do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pdbus.bus.errors import ConfigError
from pdbus.connector.flavours import NIXL_FLAVOURS
from pdbus.nodes.config import load
from pdbus.nodes.host import Host
from pdbus.nodes.setup import Setup, set_up
from pdbus.nodes.values import DEMO_MODEL

HOST = Host(cpus=(0,), memory_bytes=1 << 30, run_dir="/tmp", name_suffix="3f2a")


def setup(**flags: str) -> Setup:
    return set_up(load({"engine": "coded", **flags}, host=HOST))


def test_the_model_s_own_limit_holds_where_there_are_blocks_for_it() -> None:
    assert setup().max_model_len == 32_768


def test_a_small_kv_cache_limits_the_longest_request() -> None:
    """Otherwise a chat without max_tokens, which may run to the model's limit, would be refused every time."""
    assert setup(kv_blocks="10", block_size="8").max_model_len == 80


def test_a_length_that_was_asked_for_and_does_not_fit_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"^--max-model-len: 81 tokens do not fit .* give at most 80"):
        setup(kv_blocks="10", block_size="8", max_model_len="81")
    assert setup(kv_blocks="10", block_size="8", max_model_len="80").max_model_len == 80


def test_memory_for_less_than_two_blocks_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"^--kv-memory: 65536 bytes hold 0 blocks of \d+; at least 2"):
        setup(kv_memory="65536", block_size="1024", coded_layers="64")


@pytest.mark.parametrize("name", ["nowhere", "notes.txt"])
def test_what_is_no_model_names_the_setting(tmp_path: Path, name: str) -> None:
    (tmp_path / "notes.txt").write_text("no model")
    with pytest.raises(ConfigError, match=r"^--model: "):
        set_up(load({"model": str(tmp_path / name)}, host=HOST))


@pytest.mark.parametrize(
    ("engine", "package"), [("coded", "numpy"), ("torch", "numpy"), ("torch", "torch"), ("torch", "safetensors")]
)
def test_a_missing_package_is_named_with_what_brings_it(
    engine: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"^--engine: needs the package {package}, .*pip install 'pdbus\[node\]'"):
        setup(engine=engine, model=DEMO_MODEL)


def test_any_flavour_of_nixl_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for flavour in NIXL_FLAVOURS:
        monkeypatch.setitem(sys.modules, flavour, None)
    with pytest.raises(ConfigError, match=r"^--engine: needs the package nixl,"):
        setup()
