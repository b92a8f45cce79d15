"""`pd bench curve`: what keys on the bus cost, each thing with and without, in turns in one run.

Typed round trips between two processes that do nothing else, and a stream of tokens as fast as one can be sent: the bus
alone. Then the same of two pairs of nodes with the coded engine, one of which has keys: what a user would notice.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import AsyncExitStack
from statistics import median
from typing import Any

import uvloop

from pdbus.bus.client import Client
from pdbus.bus.key_folder import KeyFolder
from pdbus.bus.keys import Key
from pdbus.nodes.cluster import Cluster

from .bus import callers, in_turns
from .record import Turn, take_turns

STARTS = 5  # of all processes: on which core one of them wakes is luck that lasts as long as it lives
STREAMS = 10  # of each kind, for each start

Trips = tuple[list[float], list[float]]  # microseconds, without keys and with


def run(messages: int = 4000, pairs: int = 30, requests: int = 32) -> dict[str, Any]:
    """What begins with `bus_` is of the bus alone. `messages` round trips of each kind, and `pairs` of turns, spread
    over `STARTS` starts of all processes. Ratios of round trips are those of the medians of each start, of them the
    middle one; of tokens a second, the medians over pairs of turns. 1: keys cost nothing."""
    result: dict[str, Any] = uvloop.run(_run(-(-messages // STARTS), -(-pairs // STARTS), requests))
    return result


async def _run(messages: int, pairs: int, requests: int) -> dict[str, Any]:
    bus = [await _bus(messages) for _ in range(STARTS)]
    nodes = [await _nodes(messages, pairs, requests) for _ in range(STARTS)]
    return {
        **_trips("bus_", [trips for trips, _ in bus]),
        **_streams([streams for _, of_start in bus for streams in of_start]),
        **_trips("", [trips for trips, _ in nodes]),
        **_summary([turns for _, of_start in nodes for turns in of_start]),
    }


async def _bus(messages: int) -> tuple[Trips, list[tuple[float, float]]]:
    """Round trips, and tokens a second."""
    async with callers() as (plain, keyed, _):
        trips = await in_turns(plain.trip, keyed.trip, messages, turn_trips=1)
        return trips, [(await plain.stream(), await keyed.stream()) for _ in range(1 + STREAMS)][1:]


def _trips(prefix: str, starts: list[Trips]) -> dict[str, float]:
    ratios = sorted(median(keyed) / median(plain) for plain, keyed in starts)
    plain, keyed = (median(us for trips in kind for us in trips) for kind in zip(*starts, strict=True))
    return {
        f"{prefix}rtt_us": plain,
        f"keys_{prefix}rtt_us": keyed,
        f"{prefix}rtt_ratio": median(ratios),
        f"{prefix}rtt_ratio_least": ratios[0],
        f"{prefix}rtt_ratio_most": ratios[-1],
    }


def _streams(streamed: list[tuple[float, float]]) -> dict[str, float]:
    return {
        "bus_tokens_per_s": median(plain for plain, _ in streamed),
        "keys_bus_tokens_per_s": median(keyed for _, keyed in streamed),
        "bus_tokens_ratio": median(keyed / plain for plain, keyed in streamed),
    }


async def _nodes(messages: int, pairs: int, requests: int) -> tuple[Trips, list[tuple[Turn, Turn]]]:
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))  # all to each: whoever sits on one core waits for it
    options: dict[str, str | int | float | bool] = {
        "engine": "coded", "kv_blocks": 4096, "coded_vocab": 4096, "cpus": cores,
    }  # fmt: skip
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        plain, keyed = Cluster(1, 1, options=options), Cluster(1, 1, options={**options, "keys": folder})
        _allow_all(KeyFolder(folder), keyed)
        for cluster in (plain, keyed):
            await stack.enter_async_context(cluster)
        without = await stack.enter_async_context(Client(plain.decode[0].address))
        with_ = await stack.enter_async_context(Client(keyed.decode[0].address, keys=folder))
        trips = await in_turns(without.ledger, with_.ledger, messages, turn_trips=1)
        return trips, await take_turns((without, plain), (with_, keyed), pairs, requests)


def _allow_all(keys: KeyFolder, cluster: Cluster) -> None:
    """Its nodes, and a client."""
    for node in cluster.nodes:
        keys.allow(Key(name=node.name, role=node.role, public=keys.make(node.name).public, addresses=(node.address,)))
    keys.allow(Key(name="client", role="client", public=keys.make("client").public))


def _summary(turns: list[tuple[Turn, Turn]]) -> dict[str, Any]:
    ratios = sorted(keyed.tokens_per_s / plain.tokens_per_s for plain, keyed in turns)
    return {
        "tokens_per_s": median(plain.tokens_per_s for plain, _ in turns),
        "keys_tokens_per_s": median(keyed.tokens_per_s for _, keyed in turns),
        "tokens_ratio": median(ratios),
        "tokens_ratio_least": ratios[0],
        "tokens_ratio_most": ratios[-1],
        "cpu_ratio": median(keyed.cpu_us / plain.cpu_us for plain, keyed in turns),
    }
