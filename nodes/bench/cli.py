"""`pd bench ...`: what each command takes; the modules beside this one measure."""

from __future__ import annotations

import importlib
import os
from typing import Annotated, Any

import typer

from pdbus.bus.errors import ConfigError

from ..config import SETTINGS, load
from ..extras import need_node
from ..options import AsJson, group, takes_settings
from ..values import DEMO_MODEL

bench = group("Measure: bytes, messages, requests.")


@bench.command()
def transfer(
    sizes: Annotated[str, typer.Option(metavar="SIZES", help="Bytes of a read.")] = "1MiB,8MiB,32MiB",
    repeat: Annotated[int, typer.Option(min=1, max=10_000, metavar="N", help="Reads of each size.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Reads between two processes, beside raw NIXL and a copy of the same bytes: idle, over TCP, on busy cores."""
    from ..values import size

    try:
        parsed = [size(1)(part) for part in sizes.split(",")]
    except ValueError as e:
        raise ConfigError("--sizes", str(e)) from None
    _bench("transfer", as_json, sizes_bytes=parsed, rounds=repeat)


@bench.command("bus")
def bench_bus(
    messages: Annotated[int, typer.Option(min=1, max=10_000_000, metavar="N", help="Round trips.")] = 2000,
    as_json: AsJson = False,
) -> None:
    """Round trips between two processes, beside bare pyzmq carrying the same bytes."""
    _bench("bus", as_json, messages=messages)


@bench.command("curve")
def bench_curve(
    messages: Annotated[int, typer.Option(min=1, max=10_000_000, metavar="N", help="Round trips.")] = 4000,
    pairs: Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="Pairs of turns.")] = 30,
    requests: Annotated[int, typer.Option(min=2, max=100_000, metavar="K", help="Requests of a turn.")] = 32,
    as_json: AsJson = False,
) -> None:
    """What keys cost: round trips and streamed tokens with and without, in turns, with the coded engine."""
    _bench("curve", as_json, messages=messages, pairs=pairs, requests=requests)


@bench.command()
def serve(
    prompt_tokens: Annotated[int, typer.Option(min=1, max=1 << 20, metavar="N", help="Tokens of a prompt.")] = 512,
    requests: Annotated[int, typer.Option(min=1, max=100_000, metavar="K", help="Requests, one after the other.")] = 20,
    model: Annotated[str, typer.Option(metavar="MODEL", help="Instead of a random Llama of 58M parameters.")] = "",
    as_json: AsJson = False,
) -> None:
    """Requests through a prefill and a decode node, beside one node doing both."""
    _bench("serve", as_json, prompt_tokens=prompt_tokens, requests=requests, model=model)


@bench.command()
def plan(as_json: AsJson = False) -> None:
    """What it costs to plan reads between unlike KV layouts, and to apply a plan to 1,000 and 4,000 blocks."""
    _bench("plan", as_json)


@bench.command()
def smooth(
    prompt_tokens: Annotated[int, typer.Option(min=64, max=1 << 20, metavar="N", help="Of the long one.")] = 100_000,
    step_ms: Annotated[float, typer.Option(min=1, max=1000, metavar="MS", help="Time of a decode step.")] = 20.0,
    turns: Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="With the long prompt, and without.")] = 10,
    as_json: AsJson = False,
) -> None:
    """What the read of a very long prompt, whose blocks lie anywhere, does to four answers given meanwhile."""
    _bench("smooth", as_json, prompt_tokens=prompt_tokens, step_ms=step_ms, turns=turns)


@bench.command("engine")
def bench_engine(
    rounds: Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="Passes of each kind.")] = 9,
    chunk: Annotated[int, typer.Option(min=1, max=1 << 20, metavar="TOKENS", help="Of a prompt in one step.")] = 256,
    model: Annotated[str, typer.Option(metavar="MODEL", help="Instead of a random Llama of 58M parameters.")] = "",
    as_json: AsJson = False,
) -> None:
    """Forward passes in float32 and fp16 weights, beside bare linears of the same shapes."""
    _bench("engine", as_json, rounds=rounds, chunk=chunk, model=model)


@bench.command("speculate")
def bench_speculate(
    rounds: Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="Answers of each kind.")] = 3,
    drafts: Annotated[int, typer.Option(min=1, max=64, metavar="N", help="Of a step, at most.")] = 8,
    model: Annotated[str, typer.Option(metavar="MODEL", help="One that can copy.")] = DEMO_MODEL,
    draft_model: Annotated[str, typer.Option(metavar="MODEL", help="Drafts, instead of prompt lookup.")] = "",
    as_json: AsJson = False,
) -> None:
    """Decoding what repeats its prompt: with drafts and without, in turns."""
    _bench("speculate", as_json, rounds=rounds, drafts=drafts, model=model, draft_model=draft_model)


@bench.command("record")
def bench_record(
    pairs: Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="Pairs of turns.")] = 10,
    requests: Annotated[int, typer.Option(min=2, max=100_000, metavar="K", help="Requests of a turn.")] = 200,
    step_ms: Annotated[float, typer.Option(min=0, max=1000, metavar="MS", help="Time of an engine's step.")] = 0.0,
    as_json: AsJson = False,
) -> None:
    """What recording costs: the same requests with and without, in turns, with the coded engine."""
    _bench("record", as_json, pairs=pairs, requests=requests, step_ms=step_ms)


@bench.command("gateway")
def bench_gateway(
    prompt_tokens: Annotated[int, typer.Option(min=1, max=1 << 15, metavar="N", help="Tokens of a prompt.")] = 256,
    requests: Annotated[int, typer.Option(min=1, max=100_000, metavar="K", help="Requests of each kind.")] = 40,
    step_ms: Annotated[float, typer.Option(min=0, max=1000, metavar="MS", help="Time of an engine's step.")] = 5.0,
    as_json: AsJson = False,
) -> None:
    """What HTTP and the gateway add to the SDK on the node, in turns, with the coded engine."""
    _bench("gateway", as_json, prompt_tokens=prompt_tokens, requests=requests, step_ms=step_ms)


@bench.command("routing")
def bench_routing(
    turns: Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="Of each policy, 24 requests each.")] = 5,
    step_ms: Annotated[float, typer.Option(min=0, max=1000, metavar="MS", help="Time of an engine's step.")] = 20.0,
    as_json: AsJson = False,
) -> None:
    """Prefix hits and first tokens by the gateway's policy, two prefill and two decode nodes of the coded engine."""
    _bench("routing", as_json, turns=turns, step_ms=step_ms)


@bench.command("http")
def bench_http(
    clients: Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="That stream at the same time.")] = 16,
    step_ms: Annotated[float, typer.Option(min=0, max=1000, metavar="MS", help="Time of an engine's step.")] = 20.0,
    turns: Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="Of each kind, 3 s each.")] = 5,
    as_json: AsJson = False,
) -> None:
    """What streaming clients do to the bus, and tokens streamed per core, with the coded engine."""
    _bench("http", as_json, clients=clients, step_ms=step_ms, turns=turns)


@bench.command()
def interference(
    prompt_tokens: Annotated[int, typer.Option(min=64, max=1 << 20, metavar="N", help="Of the long ones.")] = 8192,
    step_ms: Annotated[float, typer.Option(min=1, max=1000, metavar="MS", help="Time of a decode step.")] = 20.0,
    token_us: Annotated[float, typer.Option(min=0, max=1e6, metavar="US", help="Time of a prompt's token.")] = 100.0,
    turns: Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="Of each kind.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Gaps between tokens while long prompts arrive, through P and D and at one node that does both."""
    _bench("interference", as_json, prompt_tokens=prompt_tokens, step_ms=step_ms, token_us=token_us, turns=turns)


NOT_MEASURED = (
    "role", "name", "run_dir", "listen", "advertise", "events", "join", "keys", "insecure", "http_host", "http_port",
    "http_keys", "http_tls_cert", "http_tls_key", "cpus",
    "record", "record_max", "record_tokens",
)  # fmt: skip


@bench.command()
@takes_settings([setting for setting in SETTINGS if setting.name not in NOT_MEASURED])
def profile(
    *,
    out: Annotated[str, typer.Option(metavar="FILE", help="Where to write the profile.")],
    longest: Annotated[int, typer.Option(min=64, max=1 << 20, metavar="TOKENS", help="Of a prompt.")] = 2048,
    rows: Annotated[int, typer.Option(min=1, max=1024, metavar="N", help="Answers decoded together at most.")] = 16,
    repeat: Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="Prompts of each length.")] = 5,
    as_json: AsJson = False,
    settings: dict[str, str],
) -> None:
    """What steps, reads and messages take on this machine, for pd-replay simulate."""
    load({**settings, "model": settings.get("model", "") or "."}, os.environ)  # blames what is wrong, before any node
    _bench("profile", as_json, out=out, settings=settings, longest=longest, rows=rows, repeat=repeat)


def _bench(name: str, as_json: bool, **options: Any) -> None:
    """`pdbus.nodes.bench.<name>.run(**options) -> dict` measures; this shows it."""
    if name != "bus":  # which needs nothing but ZeroMQ
        need_node(f"pd bench {name}")
    result = importlib.import_module(f"pdbus.nodes.bench.{name}").run(**options)
    from ..tables import print_json, print_result

    print_json(result) if as_json else print_result(f"pd bench {name}", result)
