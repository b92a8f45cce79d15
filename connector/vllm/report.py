"""What a vLLM server's connector tells of itself, read off its core as it stands; and who is answered what.

The same fields as of a node of pdbus, where they mean the same (docs/vllm.md). Pairs are nobody's business but those of
the two servers, and are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdbus.bus.errors import RequestError
from pdbus.bus.messages import (
    Cancel,
    Connect,
    Credit,
    Disconnect,
    FetchTokenizer,
    Generate,
    Ledger,
    LedgerReply,
    Message,
    Status,
    StatusReply,
)
from pdbus.bus.wire import to_plain

from .core import PairCore
from .shelf import Prompt
from .wants import Want

NOT_HERE = (Generate, Cancel, Credit, FetchTokenizer, Connect, Disconnect)  # a node's, over the bus


def answer_to(message: Message, core: PairCore, more: Mapping[str, Any]) -> Message | None:
    """The answer to what a tool may ask; `more` is what the shell knows. None: it is for the core.

    Raises RequestError for what only nodes of pdbus do.
    """
    match message:
        case Status():
            return StatusReply(status={**more, **status(core)})
        case Ledger():
            clean, table = ledger(core)
            return LedgerReply(clean=clean, ledger=table)
        case _ if isinstance(message, NOT_HERE):
            raise RequestError(f"{core.config.name} is a vLLM server: it does not take {message.KIND} on the bus")
    return None


def status(core: PairCore) -> dict[str, Any]:
    reasons = not_ready(core)
    clean, table = ledger(core)
    return {
        "name": core.config.name,
        "incarnation": core.config.incarnation.hex(),
        "role": core.config.role,
        "engine": "vllm",
        "block_size": core.config.block_size,
        "epoch": core.mover.epoch,
        "ready": not reasons,
        "not_ready": reasons,
        "peers": peers(core),
        "leases": core.offers.rows(),
        "reads": core.fetches.rows(),
        "requests": [*map(_prompt, core.shelf.prompts()), *map(_want, core.wants.all())],
        "ledger": {"clean": clean, **table},
        "counters": {**core.prompts.counters, **core.wants.counters},
    }


def not_ready(core: PairCore) -> list[str]:
    """Why nothing is handed over now; empty when it can be. vLLM itself computes prompts in any case."""
    reasons = []
    if not core.mover.up:
        reasons.append("the mover is not up")
    if core.mover.healing:
        reasons.append("the mover is being replaced: too many blocks wait for reads that do not end")
    if core.offers.draining:
        reasons.append("the connector is draining")
    if core.config.role == "decode" and not core.peers.prefill_peers():
        reasons.append("no prefill server is a member")
    return reasons


def ledger(core: PairCore) -> tuple[bool, dict[str, Any]]:
    """Every block of the slab; clean when nothing is handed over, nor kept for a reader."""
    counts = core.pool.counts()
    table = {
        "blocks": to_plain(counts),
        "leases": core.offers.held(),
        "reads": len(core.fetches.transfers),
        "requests": len(core.shelf) + len(core.wants),
    }
    return counts.free == counts.total and not any(table[key] for key in ("leases", "reads", "requests")), table


def peers(core: PairCore) -> list[dict[str, Any]]:
    fetching, reading = core.wants.fetching_from(), core.prompts.readers()
    return [
        {
            "name": p.name,
            "address": p.address,
            "role": p.role,
            "state": p.state.value,
            "detail": p.reason,
            "draining": p.draining,
            "epoch": p.epoch,
            "incarnation": p.incarnation.hex(),
            "leases": reading.get(p.name, 0),
            "fetches": fetching.get(p.name, 0),
        }
        for p in core.peers.members()
    ]


def _prompt(prompt: Prompt) -> dict[str, Any]:
    return {
        "request": prompt.reader[2].hex() if prompt.reader is not None else "",
        "vllm_request": prompt.request,
        "state": _state(prompt),
        "prompt_tokens": prompt.prompt_tokens,
        "ready": prompt.ready,
        "decode_node": prompt.reader[0] if prompt.reader is not None else "",
    }


def _state(prompt: Prompt) -> str:
    if prompt.spent:
        return "spent"
    if prompt.try_ is not None:
        return "leased"
    return "parked" if prompt.left else "computed" if prompt.complete else "computing"


def _want(want: Want) -> dict[str, Any]:
    return {
        "request": want.id.hex(),
        "vllm_request": want.request,
        "state": want.state.value,
        "prompt_tokens": want.prompt_tokens,
        "cached_tokens": want.have,
        "prefill_node": want.node,
        "problem": want.problem,
    }
