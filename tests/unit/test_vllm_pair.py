"""What of a request's parameters is taken under vLLM, and what of a server's settings: everything else is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdbus.bus.errors import ConfigError
from pdbus.connector.vllm.model import check_version, shape_of
from pdbus.connector.vllm.pair import Pair, pair_of
from pdbus.connector.vllm.settings import settings_of

TOKEN = "0123456789abcdef" * 2


def test_a_pair_is_32_hexadecimal_digits_and_perhaps_a_node() -> None:
    assert pair_of({"pdbus_pair": TOKEN}) == Pair(bytes.fromhex(TOKEN))
    assert pair_of({"pdbus_pair": f"{TOKEN}@p-1"}) == Pair(bytes.fromhex(TOKEN), "p-1")


@pytest.mark.parametrize(
    "parameters",
    [
        None, {}, "text", [TOKEN], {"pdbus_pair": None}, {"pdbus_pair": 7}, {"pdbus_pair": TOKEN[:-1]},
        {"pdbus_pair": TOKEN + "0"}, {"pdbus_pair": TOKEN.upper()}, {"pdbus_pair": TOKEN + "\n"},
        {"pdbus_pair": f"{TOKEN}@"}, {"pdbus_pair": f"{TOKEN}@a/b"}, {"pdbus_pair": f"{TOKEN}@{'n' * 64}"},
        {"pair": TOKEN}, {"do_remote_prefill": True, "remote_block_ids": [1]},
    ],
)  # fmt: skip
def test_whatever_else_a_client_sends_is_no_pair(parameters: object) -> None:
    assert pair_of(parameters) is None


def settings(given: dict[str, Any], **more: Any) -> Any:
    context = {"kv_role": "kv_consumer", "buffer_device": "cpu", "environment": {}, "unique": "abcd", **more}
    return settings_of(given, **context)


def test_settings_have_defaults() -> None:
    assert settings({}).name == "vllm-decode-abcd"
    assert settings({}).listen == "tcp://127.0.0.1:0"
    assert settings({}, kv_role="kv_producer").role == "prefill"
    assert settings({"role": "prefill"}, kv_role="kv_both").role == "prefill"
    assert settings({"join": "tcp://127.0.0.1:7800"}).join == ("tcp://127.0.0.1:7800",)


def test_what_other_connectors_read_says_where_to_listen() -> None:
    environment = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600"}
    assert settings({}, environment=environment).listen == "tcp://127.0.0.1:5600"


@pytest.mark.parametrize(
    ("given", "more", "named"),
    [
        ({"jion": "x"}, {}, "jion"),
        ({"listen": "tcp://0.0.0.0:7800"}, {}, "no address"),
        ({"listen": "tcp://10.0.0.1:7800"}, {}, "keys"),
        ({"listen": "tcp://0.0.0.0:7800", "keys": "k"}, {}, "no address"),
        ({"keys": 7}, {}, "keys"),
        ({"record": ""}, {}, "record"),
        ({"listen": "7800"}, {}, "listen"),
        ({"listen": 7800}, {}, "listen"),
        ({"join": 7800}, {}, "join"),
        ({"join": ["tcp://"]}, {}, "join"),
        ({"kv_memory_mib": 0}, {}, "kv_memory_mib"),
        ({"kv_memory_mib": 1.5}, {}, "whole number"),
        ({"kv_memory_mib": True}, {}, "kv_memory_mib"),
        ({"lease_s": "30"}, {}, "lease_s"),
        ({"lease_s": float("nan")}, {}, "lease_s"),
        ({"role": "both"}, {}, "neither prefill nor decode"),
        ({}, {"kv_role": "kv_both"}, "kv_producer or kv_consumer"),
        ({}, {"buffer_device": "cuda"}, "kv_buffer_device"),
    ],
)
def test_bad_settings_are_named(given: dict[str, Any], more: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        settings(given, **more)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.4", "0.32.1rc1+cpu"])
def test_versions_that_are_known(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0", "dev", ""])
def test_other_versions_are_refused_at_once(version: str) -> None:
    with pytest.raises(ConfigError, match=r"needs 0\.32 or newer, below 0\.33"):
        check_version(version)


class FullAttentionSpec(SimpleNamespace):
    pass


def shape(**changed: Any) -> Any:
    spec = FullAttentionSpec(dtype="torch.float32", num_kv_heads=2, head_size=32, block_size=32, page_size_bytes=16384)
    spec.__dict__.update({k: v for k, v in changed.items() if k in spec.__dict__})
    group = SimpleNamespace(kv_cache_spec=changed.get("spec", spec), layer_names=["l0", "l1"])
    caches = SimpleNamespace(kv_cache_groups=[group] * changed.get("groups", 1), kv_cache_layout="LBHNC")
    parallel = SimpleNamespace(tensor_parallel_size=changed.get("tp", 1))
    model = SimpleNamespace(model=changed.get("model", "a/b"), revision=None, dtype="torch.float32", max_model_len=512)
    config = SimpleNamespace(
        parallel_config=parallel, model_config=model, speculative_config=changed.get("speculative")
    )
    return shape_of(config, caches, version="0.32.0")


def test_the_shape_of_a_servers_kv() -> None:
    made = shape()
    assert (made.geometry.layers, made.geometry.kv_heads, made.geometry.block_size) == (2, 2, 32)
    assert made.layers == ("l0", "l1")


@pytest.mark.parametrize("changed", [{"block_size": 64, "page_size_bytes": 32768}, {"model": "a/c"}])
def test_servers_whose_pages_differ_have_other_fingerprints(changed: dict[str, Any]) -> None:
    """Pages are copied as they lie: what decides how they lie must keep a pair apart."""
    assert shape(**changed).fingerprint != shape().fingerprint


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"tp": 2}, "--tensor-parallel-size"),
        ({"speculative": "ngram"}, "--speculative-config"),
        ({"groups": 2}, "disable-hybrid-kv-cache-manager"),
        ({"spec": SimpleNamespace()}, "only full attention"),
        ({"dtype": "torch.float8_e4m3fn"}, "float8"),
        ({"page_size_bytes": 9000}, "packed caches"),
    ],
)
def test_what_cannot_be_handed_over_is_refused_at_the_start(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        shape(**changed)
