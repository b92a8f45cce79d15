"""What a node tells of itself: status and ledger, read off the core as it stands. Changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdbus.bus import members as ms
from pdbus.bus.compatibility import PREFILL_ROLES
from pdbus.bus.messages import Outcome
from pdbus.bus.wire import to_plain

from .circuits import CircuitState
from .core import NodeCore
from .decode import Request
from .peers import LOADING, key_of

NEWS_CHARS_MAX = 1000
PREFIX = "pdbus_"  # of every metric's name
IGNORED = ("ignored.", "unexpected.", "stale", "request.stale", "request.repeated", "renew.not_held")

Sample = tuple[str, dict[str, str], float]  # what stands behind the family's name, labels, value
Family = tuple[str, str, str, list[Sample]]  # name, type, meaning


def ledger(core: NodeCore) -> tuple[bool, dict[str, Any]]:
    """Every block and lease accounted for; clean when nothing but free and cached blocks is left."""
    counts = core.pool.counts()
    table = {
        "blocks": to_plain(counts),
        "leases": core.offers.held(),
        "reads": len(core.fetches.transfers),
        "copies": len(core.staging),
        "requests": len(core.requests),
        "sequences": len(list(core.scheduler.sequences())),
    }
    clean = counts.free + counts.cached == counts.total and not any(
        table[k] for k in ("leases", "reads", "copies", "requests", "sequences")
    )
    return clean, table


def not_ready(core: NodeCore) -> list[str]:
    """Why the node cannot serve now; empty when it can."""
    reasons = []
    if not core.worker_up:
        reasons.append("the worker is not up")
    if not core.mover.up:
        reasons.append("the mover is not up")
    if core.mover.healing:
        reasons.append("the mover is being replaced: too many blocks wait for reads that do not end")
    if core.drain_until is not None:
        reasons.append("the node is draining")
    return reasons


def requests(core: NodeCore, now: int) -> list[dict[str, Any]]:
    return [_request(r, now) for r in core.requests.all()]


def _request(r: Request, now: int) -> dict[str, Any]:
    return {
        "request": r.request.hex(),
        "client": r.client,
        "state": r.state.value,
        "age_ms": round((now - r.marks.arrived) / 1e6, 1),
        "left_ms": round((r.deadline_ns - now) / 1e6, 1),
        "prompt_tokens": r.prompt_tokens,
        "cached_tokens": r.cached_tokens,
        "generated": r.generated,
        "attempts": r.attempts,
        "prefill_node": r.node,
    }


def peers(core: NodeCore, now: int) -> list[dict[str, Any]]:
    fetching, reading = core.requests.fetching_from(), core.prefills.readers()
    return [
        {
            "name": p.name,
            "address": p.address,
            "role": p.role,
            "state": p.state.value,
            "detail": p.reason or core.peers.problem(p),
            "circuit": "" if (circuit := core.peers.circuit(p)) is CircuitState.CLOSED else circuit.value,
            "draining": p.draining,
            "epoch": p.epoch,
            "incarnation": p.incarnation.hex(),
            "http": p.http,
            "leases": reading.get(p.name, 0),
            "fetches": fetching.get(p.name, 0),
            "prefill_tokens_per_s": p.load.prefill_tokens_per_s if p.load else 0,
            "read_bytes_per_s": core.places.sources.read_bytes_per_s(key_of(p), now),
        }
        for p in core.peers.members()
    ]


def directory(core: NodeCore) -> dict[str, ms.Peer]:
    """Whom each name and address stands for. Of those who were there one after the other, the one that is."""
    found: dict[str, ms.Peer] = {}
    for p in core.peers.members():
        for target in filter(None, (p.name, p.address, p.called_at, *p.aliases)):
            if target not in found or (p.state is ms.PeerState.UP and found[target].state is not ms.PeerState.UP):
                found[target] = p
    return found


def joined(core: NodeCore, addresses: Sequence[str]) -> list[Outcome | None]:
    """What joining each address has come to, good or bad; None while it is under way."""
    known = directory(core)
    return [_joined(core, address, known.get(address)) for address in addresses]


def _joined(core: NodeCore, address: str, p: ms.Peer | None) -> Outcome | None:
    if p is None or p.calling:
        return None
    if p.state is ms.PeerState.UP:
        problem = core.peers.problem(p)
        return None if problem == LOADING else Outcome(target=address, ok=not problem, detail=problem or p.name)
    if p.reason:
        return Outcome(target=address, ok=False, detail=p.reason)
    return None


def removed(core: NodeCore, targets: Sequence[str]) -> list[Outcome]:
    """What asking for the removal of each name or address has come to."""
    known = directory(core)
    return [_removed(target, known.get(target)) for target in targets]


def _removed(target: str, p: ms.Peer | None) -> Outcome:
    if p is None or p.state not in (ms.PeerState.REMOVING, ms.PeerState.REMOVED):
        return Outcome(target=target, ok=False, detail="no member of that name or address")
    return Outcome(target=target, ok=True, detail=p.name)


def waiting(core: NodeCore, addresses: Sequence[str]) -> list[str]:
    """Why joining each address is not decided yet."""
    known = directory(core)
    return [_waiting(core, known.get(address)) for address in addresses]


def _waiting(core: NodeCore, p: ms.Peer | None) -> str:
    if p is None or p.state is not ms.PeerState.UP:
        return "no answer yet: it is called again and again"
    return f"linked with {p.name}, but {core.peers.awaited(p)}: it is used by itself as soon as that is done"


def news(event: str, data: dict[str, Any]) -> str:
    """One line for the log about what happened to another node; '' for what is no news to people."""
    return " ".join(_news(event, data).split())[:NEWS_CHARS_MAX]  # much of it is what that node says of itself


def _news(event: str, data: dict[str, Any]) -> str:
    who = data["node"] or data.get("address", "")
    match event:
        case "node.up":
            return f"{who} ({data['role']}) is a member"
        case "node.down":
            return f"{who} is gone: {data['reason']}"
        case "node.unreachable":
            return f"{' at '.join(filter(None, (data['node'], data['address'])))} cannot be joined: {data['reason']}"
        case "node.refused":
            return f"{who} was refused: {data['reason']}"
        case "circuit.opened":
            wait_s = data["for_ms"] / 1000
            return f"{who} is not asked for prompts for {wait_s:g} s: attempts fail there, the last: {data['cause']}"
        case "circuit.closed":
            return f"{who} is asked for prompts again"
    return ""


def metrics(core: NodeCore, counters: dict[str, int], now: int) -> dict[str, float]:
    """Gauges, and counters whose names end in _total, for /metrics. Names are only ever added."""
    counts, reads = core.pool.counts(), core.fetches.transfers
    fetching = sum(core.requests.fetching_from().values())
    oldest = core.offers.oldest_ns()
    return {
        "kv_blocks": counts.total,
        "kv_blocks_free": counts.free,
        "kv_blocks_cached": counts.cached,
        "kv_blocks_in_use": counts.in_use,
        "kv_blocks_quarantined": counts.quarantined,
        "leases_held": core.offers.held(),
        "lease_age_max_seconds": (now - oldest) / 1e9 if oldest is not None else 0,
        "tombstones": core.offers.tombstones(),
        "reads_open": len(reads),
        "reads_late_blocks": reads.late_blocks(),
        "reads_overdue_total": reads.counters["read.overdue"],
        "reads_quarantined_total": reads.counters["read.left"],
        "reads_reaped_total": reads.counters["read.mover reaped"],
        "requests": len(core.requests),
        "requests_waiting": core.requests.waiting,
        "requests_fetching": fetching,
        "requests_running": len(core.requests) - core.requests.waiting - fetching,
        "requests_preempted_total": core.requests.counters["preempted"],
        "waiting_prefill_tokens": core.scheduler.waiting_tokens(),
        "prefill_tokens_per_s": core.places.steps.said(now)[0],
        "agent_epoch": core.mover.epoch,
        "kv_copies_open": len(core.staging),
        "kv_copies_total": core.staging.counters["copies"],
        "kv_copies_in_step_total": core.staging.counters["in_step"],
        "kv_copied_bytes_total": core.staging.counters["bytes"],
        "kv_digests_right_total": core.fetches.counters["digest.right"],
        "kv_digests_wrong_total": core.fetches.counters["digest.wrong"],
        **{f"bus_{name}_total": count for name, count in counters.items()},
    }


CIRCUITS = {CircuitState.CLOSED: 0, CircuitState.HALF_OPEN: 1, CircuitState.OPEN: 2}


def families(core: NodeCore) -> list[Family]:
    """What has labels: every prefill node's circuit, and the late, doubled and unknown messages of the hand-off."""
    circuits: list[Sample] = [
        ("", {"peer": p.name}, CIRCUITS[core.peers.circuit(p)])
        for p in core.peers.members()
        if p.name and p.role in PREFILL_ROLES
    ]
    machines = {"offer": core.offers.counters, "fetch": core.fetches.counters, "read": core.fetches.transfers.counters}
    ignored: list[Sample] = [
        ("_total", {"machine": machine, "what": what}, count)
        for machine, counters in machines.items()
        for what, count in counters.items()
        if what.endswith(".late") or what.startswith(IGNORED)
    ]
    return [
        (f"{PREFIX}peer_circuit", "gauge", "0: asked for prompts; 1: one trial is out; 2: not asked.", circuits),
        (f"{PREFIX}handoff_ignored", "counter", "Late, doubled, stale and unknown messages and events.", ignored),
    ]
