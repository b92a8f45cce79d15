"""`pd eval`: the figures of a node that is there, or of a cluster started for it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from rich.console import Console
from rich.progress import Progress

from pdbus.bus.client import Client
from pdbus.bus.errors import ConfigError
from pdbus.bus.ports import parse_address
from pdbus.nodes.cluster import Cluster
from pdbus.nodes.config import load
from pdbus.nodes.extras import need_node
from pdbus.nodes.models.config import DEMO_NAME
from pdbus.nodes.setup import set_up
from pdbus.nodes.tables import print_json, print_result
from pdbus.nodes.tokenizer_files import fetch_tokenizer
from pdbus.nodes.up import with_model

from .scoring import TOKENS_MAX, Figures, evaluate
from .tasks import Expected, Tasks, load_tasks

BLOCK_SIZE = "64"  # of nodes of its own: questions share no whole block, so that each goes to the prefill node


def run_eval(address: str, prefill: int | None, settings: Mapping[str, str], keys: str, *, as_json: bool) -> int:
    """0. Raises ConfigError for what cannot go together, and what a node refuses."""
    if address:
        parse_address(address, "ADDRESS")
        if settings or prefill is not None:
            given = "--prefill" if prefill is not None else f"--{next(iter(settings)).replace('_', '-')}"
            raise ConfigError(given, "is of nodes that pd eval starts; those at an ADDRESS have their own settings")
        tasks, expected = load_tasks()
        model, figures = asyncio.run(_asked(address, tasks, keys))
    else:
        need_node("pd eval")
        options = checked({"model": os.environ.get("PD_MODEL") or DEMO_NAME, "block_size": BLOCK_SIZE, **settings})
        tasks, expected = load_tasks()
        model, figures = asyncio.run(of_its_own(prefill or 0, options, tasks))
    _show(model, figures, expected, as_json=as_json)
    return 0


def checked(settings: Mapping[str, str]) -> dict[str, str]:
    """The settings of nodes that can be started. Raises ConfigError for what is wrong, before any node."""
    environment = {name: value for name, value in os.environ.items() if name != "PD_KEYS"}
    chosen = load({**settings, "role": "both"}, environment)
    try:
        set_up(chosen)
    except ConfigError as e:
        raise chosen.as_written(e) from None
    return with_model(settings)


async def of_its_own(prefill: int, options: Mapping[str, str], tasks: Tasks) -> tuple[str, Figures]:
    """The model's name and its figures, on one node, or through `prefill` nodes and a decode node."""
    async with _started(prefill, options) as cluster:
        return await _asked((cluster.decode or cluster.both)[0].address, tasks, "")


@asynccontextmanager
async def _started(prefill: int, options: Mapping[str, str]) -> AsyncIterator[Cluster]:
    cluster = Cluster(prefill, int(prefill > 0), int(not prefill), options=options)
    with Console(stderr=True).status("starting nodes"):
        await cluster.start()
    try:
        yield cluster
    finally:
        await cluster.stop()


async def _asked(address: str, tasks: Tasks, keys: str) -> tuple[str, Figures]:
    """The model's name, and its figures."""
    async with Client(address, keys=keys or None) as client:
        node = await client.node()
        if 0 < node.hello.max_model_len <= TOKENS_MAX:
            most = f"{node.name} takes {node.hello.max_model_len} tokens a request, the texts need {TOKENS_MAX + 1}"
            raise ConfigError("--max-model-len", most)
        tokenizer = await fetch_tokenizer(client)
        total = len(tasks.capitals) + sum(map(len, tasks.texts.values()))
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("questions and texts", total=total)
            return node.hello.model, await evaluate(client, tokenizer, tasks, lambda: bar.advance(task))


def _show(model: str, figures: Figures, expected: Expected, *, as_json: bool) -> None:
    if as_json:
        print_json({"capitals": figures.capitals, "perplexity": figures.perplexity})
        return
    rows: list[dict[str, Any]] = [{"figure": "capitals", "found": figures.capitals}]
    rows += [{"figure": f"perplexity of {name}", "found": found} for name, found in figures.perplexity.items()]
    if model == DEMO_NAME:
        for row, wanted in zip(rows, (expected.capitals, *expected.perplexity.values()), strict=True):
            row["in_float32"] = wanted
    summary = {"model": model, "prompts": figures.prompts, "prefilled_on_prefill_nodes": figures.remote}
    print_result("pd eval", {**summary, "figures": rows})
