"""`pd demo`: the main job on the demo model, and the proof that it changes nothing.

A few chat prompts are prefilled on one node and decoded on another, streamed over the OpenAI HTTP API. During the last
one the prefill node is killed. The same prompts then run on one node that does both: every token must be equal, every
block back, and the recording of it all must verify.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from pdbus.bus.client import Client
from pdbus.bus.errors import PdError

from .chat_stream import Answered, chat
from .cluster import Cluster
from .extras import need_node
from .incident import explained, killed_in_mid_read, recording_folder
from .node_process import NodeProcess
from .tables import size

TOKENS_MAX = 32
CLEAN_S = 10.0  # for the last lease.released and the last drop of a block to have been heard
OPTIONS = {"deterministic": True, "kv_memory": "512MiB", "prefill_chunk": 128, "max_model_len": 2048}

LONG_PROMPT = """Here are notes of a meeting about a slow web shop.

The shop answers in half a second on most days, but every Friday evening it takes ten. The team looked at the database
first, because it was the usual suspect: no query took longer than on other days, and the disks were idle. Then they
looked at the network between the two data centres; it carried a tenth of what it could. The load balancer sent the same
share to every server. Anna noticed that memory on the servers grew all week and fell back to nothing on Friday at
midnight, when the weekly restart ran. Boris remembered that the image cache had been changed in spring: since then it
kept every resized picture and never threw one away. On Friday evening, when the week's pictures filled all memory, the
kernel began to write pages to disk, and every request had to wait for them. Carla proposed to bound the cache to one
gigabyte and to drop what had not been used for longest. Dmitri asked whether the hit rate would suffer, so they tried
it on one server for a day: the hit rate fell from 97 to 96 percent and the memory stayed flat. They decided to
roll it out on Monday, to remove the weekly restart a month later, and to draw the cache's size on the wall where all
can see it.

What was the cause of the slowness, and what did the team decide? Answer in two sentences."""
PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Name three primary colours.",
    LONG_PROMPT,
)

INCIDENT_PROMPT = f"A team has written down what happened. {LONG_PROMPT}"  # begins otherwise: nothing of it is cached

PHASES = ("queue", "prefill", "read", "confirm", "handover", "ttft", "itl")


class Run(NamedTuple):
    """All prompts through one cluster, that of the incident last."""

    answers: list[Answered]
    unclean: list[str]  # nodes whose ledger shows something left over


def run_demo() -> int:
    """0 when every token was equal and every block is back, else 1. Raises ConfigError when there is no model."""
    from .models.demo import fetch_demo_model

    need_node("pd demo")
    console = Console(highlight=False)
    folder = fetch_demo_model()
    began_s = time.monotonic()
    try:
        code = asyncio.run(_demo({"model": str(folder), **OPTIONS}, console))
    except PdError as e:
        print(f"pd: {e}", file=sys.stderr)
        return 1
    console.print(f"{time.monotonic() - began_s:.0f} s", style="dim")
    return code


async def _demo(options: dict[str, Any], console: Console) -> int:
    recording = recording_folder()
    apart = Cluster(prefill=1, decode=1, options={**options, "record": str(recording)})
    async with _started(apart, "a prefill node and a decode node", console):
        two = await _two_acts(apart, console)
    console.print("\nThe same prompts, all at once, on one node that does both:")
    whole = Cluster(prefill=0, decode=0, both=1, options=options)
    async with _started(whole, "one node", console):
        one = Run(await _ask_all_at_once(whole.both[0]), await _unclean(whole))
    verified = explained(recording, two.answers[-1].id, console)
    return verdict(two, one, verified, console)


@asynccontextmanager
async def _started(cluster: Cluster, what: str, console: Console) -> AsyncIterator[None]:
    with console.status(f"starting {what}"):
        await cluster.start()
    try:
        for node in cluster.nodes:
            console.print(f"{node.name} pid {node.pid} {node.address} {node.http}".rstrip(), style="dim")
        yield
    finally:
        await cluster.stop()


async def _two_acts(cluster: Cluster, console: Console) -> Run:
    telling, decode = _Telling(console), cluster.decode[0]
    answers = [await _ask(decode, prompt, telling) for prompt in PROMPTS]
    unclean = await _unclean(cluster)
    console.print("\nAn incident:")
    answers.append(await killed_in_mid_read(cluster, _ask(decode, INCIDENT_PROMPT, telling), console))
    return Run(answers, [*unclean, *await _unclean(cluster)])


async def _ask_all_at_once(node: NodeProcess) -> list[Answered]:
    """Neighbours must not change a token."""
    prompts = (*PROMPTS, INCIDENT_PROMPT)
    asked = (asyncio.to_thread(chat, node.http, prompt, TOKENS_MAX, lambda text: None) for prompt in prompts)
    return list(await asyncio.gather(*asked))


async def _ask(node: NodeProcess, prompt: str, telling: _Telling) -> Answered:
    telling.asked(prompt)
    answered = await asyncio.to_thread(chat, node.http, prompt, TOKENS_MAX, telling.text)
    telling.answered(answered)
    return answered


async def _unclean(cluster: Cluster) -> list[str]:
    """Names of living nodes on which something is left over."""
    return [node.name for node in cluster.nodes if node.running and not await _is_clean(node)]


async def _is_clean(node: NodeProcess) -> bool:
    """Asks until the ledger is clean or it takes too long."""
    async with Client(node.address) as client:
        end_s = time.monotonic() + CLEAN_S
        while not (await client.ledger()).clean:
            if time.monotonic() > end_s:
                return False
            await asyncio.sleep(0.1)
    return True


class _Telling:
    """Shows a conversation as it happens."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def asked(self, prompt: str) -> None:
        first, _, rest = prompt.partition("\n")
        more = f" ... ({len(prompt.split())} words)" if rest else ""
        self._console.print(Text(f"\n> {first}{more}", style="bold"), soft_wrap=True)

    def text(self, piece: str) -> None:
        self._console.print(Text(piece), end="", soft_wrap=True)

    def answered(self, answered: Answered) -> None:
        self._console.print()
        self._console.print(timeline_line(answered.timeline), style="cyan", soft_wrap=True)


def timeline_line(timeline: dict[str, Any]) -> Text:
    """A request's timeline, as `pd_timeline` gives it, in one line."""
    parts = [
        f"{phase.upper() if phase in ('ttft', 'itl') else phase} {timeline[f'{phase}_ms']:.1f}" for phase in PHASES
    ]
    if not timeline["remote"]:
        return Text(f"  {'  '.join(parts)} ms  prefilled on the decode node itself")
    moved, moving_s = timeline["read_bytes"], timeline["mover_ms"] / 1e3
    rate = f" at {moved / moving_s / 1e9:.2f} GB/s" if moving_s else ""
    return Text(f"  {'  '.join(parts)} ms  {size(moved)}{rate} from {timeline['prefill_node']}")


def verdict(two: Run, one: Run, verified: bool, console: Console) -> int:
    """Says what was equal and what is back; 0 when all is well."""
    checks: Sequence[tuple[bool, str]] = (
        _equal(two.answers, one.answers),
        _clean([*two.unclean, *one.unclean]),
        _remote([answered.timeline for answered in two.answers[:-1]]),
        _survived(two.answers[-1].timeline),
        (verified, "the recording verifies: every decision comes out the same again, no invariant is broken"),
    )
    for good, said in checks:
        mark = Text("ok  ", style="bold green") if good else Text("FAILED  ", style="bold red")
        console.print(Text.assemble(mark, said), soft_wrap=True)
    return int(not all(good for good, _ in checks))


def _equal(two: Sequence[Answered], one: Sequence[Answered]) -> tuple[bool, str]:
    differ = [i + 1 for i, (a, b) in enumerate(zip(two, one, strict=True)) if a.tokens != b.tokens or not a.tokens]
    count = sum(len(answered.tokens) for answered in two)
    if differ:
        return False, f"answers {', '.join(map(str, differ))} differ from those of one node"
    return True, f"all {count} tokens of {len(two)} answers are equal to those of one node"


def _clean(unclean: Sequence[str]) -> tuple[bool, str]:
    if unclean:
        return False, f"blocks or leases are left over on {', '.join(unclean)}"
    return True, "every block is back on every node"


def _survived(timeline: dict[str, Any]) -> tuple[bool, str]:
    attempts = timeline["attempts"]
    return attempts > 0 and not timeline["remote"], (
        f"the prefill node died after {attempts} attempt there; the decode node computed the prompt itself"
    )


def _remote(timelines: Sequence[dict[str, Any]]) -> tuple[bool, str]:
    remote = sum(bool(timeline["remote"]) for timeline in timelines)
    moved = sum(timeline["read_bytes"] for timeline in timelines)
    return remote > 0, f"{remote} of {len(timelines)} prompts were prefilled on the prefill node, {size(moved)} read"
