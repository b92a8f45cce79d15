"""What of a request's parameters is taken under vLLM, and what of a server's settings: everything else is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdbus.bus.errors import ConfigError
from pdbus.bus.wire import replace
from pdbus.connector.plan import plan
from pdbus.connector.readable import unreadable
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
    """Of a model with 4 KV heads, as vLLM's configuration has it."""
    tp = changed.get("tensor_parallel_size", 1)
    held = max(1, 4 // tp)
    spec = FullAttentionSpec(
        dtype="torch.float32", num_kv_heads=held, head_size=32, block_size=32, page_size_bytes=held * 8192
    )
    spec.__dict__.update({k: v for k, v in changed.items() if k in spec.__dict__})
    group = SimpleNamespace(kv_cache_spec=changed.get("spec", spec), layer_names=["l0", "l1"])
    caches = SimpleNamespace(
        kv_cache_groups=[group] * changed.get("groups", 1), kv_cache_layout=changed.get("layout", "LBHNC")
    )
    parallel = SimpleNamespace(tensor_parallel_size=tp)
    parallel.__dict__.update({k: v for k, v in changed.items() if k.endswith("_parallel_size") or k == "nnodes"})
    model = SimpleNamespace(
        model=changed.get("model", "a/b"), revision=None, dtype="torch.float32", max_model_len=512,
        get_total_num_kv_heads=lambda: 4,
    )  # fmt: skip
    config = SimpleNamespace(
        parallel_config=parallel, model_config=model, speculative_config=changed.get("speculative")
    )
    return shape_of(config, caches, version="0.32.0")


def test_the_shape_of_a_servers_kv() -> None:
    made = shape()
    assert (made.geometry.layers, made.geometry.kv_heads, made.geometry.block_size) == (2, 4, 32)
    assert made.layers == ("l0", "l1")


@pytest.mark.parametrize(
    ("tp", "heads", "page_bytes", "runs"),
    [(1, [(0, 1, 2, 3)], 32768, 1), (2, [(0, 1), (2, 3)], 16384, 2), (8, [(r // 2,) for r in range(8)], 8192, 1)],
)
def test_ranks_share_the_heads_as_vllm_does(tp: int, heads: list[tuple[int, ...]], page_bytes: int, runs: int) -> None:
    made = shape(tensor_parallel_size=tp)
    assert [layout.heads for layout in made.layouts(5)] == heads
    assert (made.page_bytes, made.head_runs) == (page_bytes, runs)


def test_a_rank_reads_whole_heads_of_whoever_has_them() -> None:
    """Nothing is known of what is inside of a head, so that nothing may cut or permute it."""
    one, two = shape(), shape(tensor_parallel_size=2)
    head_bytes = 8192
    for sources, target in ((one.layouts(5), two.layouts(7)[1]), (two.layouts(7), one.layouts(5)[0])):
        made = plan(sources, target, run_bytes_min=0)
        assert sum(box.bytes for rank in made.ranks for box in rank.pieces[0].direct) == target.block_stride
        for rank in made.ranks:
            (piece,) = rank.pieces
            assert piece.tokens == 32
            for box in piece.direct:
                assert all(n % head_bytes == 0 for n in (box.source, box.target, box.length))
                assert all(step % head_bytes == 0 for axis in box.axes for step in (axis.source, axis.target))


def test_servers_of_other_numbers_of_ranks_can_share_kv() -> None:
    one, two = shape(), shape(tensor_parallel_size=2)
    assert one.fingerprint == two.fingerprint
    assert unreadable(one.geometry, two.geometry) == unreadable(two.geometry, one.geometry) == ()
    three = replace(two.geometry, tp=3)
    ((field, theirs, ours),) = unreadable(one.geometry, three)
    assert (field, theirs) == ("tp", "1") and ours.startswith("3 (3 ranks cannot share 4 KV heads")


@pytest.mark.parametrize("changed", [{"block_size": 64, "page_size_bytes": 65536}, {"model": "a/c"}])
def test_servers_whose_pages_differ_have_other_fingerprints(changed: dict[str, Any]) -> None:
    """Pages are copied as they lie: what decides how they lie must keep a pair apart."""
    assert shape(**changed).fingerprint != shape().fingerprint


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size: 2, but only 1"),
        ({"data_parallel_size": 4}, "--data-parallel-size: 4, but only 1"),
        ({"decode_context_parallel_size": 2}, "--decode-context-parallel-size: 2, but only 1"),
        ({"nnodes": 2}, "--nnodes: 2, but only 1"),
        ({"tensor_parallel_size": 3}, "--tensor-parallel-size: 3: 3 ranks cannot share 4 KV heads"),
        ({"tensor_parallel_size": 2, "num_kv_heads": 4}, "keeps 4 of 4 KV heads on each of 2 ranks, not 2"),
        (
            {"tensor_parallel_size": 2, "layout": "LBNHC"},
            r"2 ranks need KV that lies by heads \(LBHNC\), but it lies LBNHC",
        ),
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
