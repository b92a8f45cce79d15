"""The live page: one file that fetches nothing but its own data, and what it asks for, as plain values.

The page itself tells nothing, so that it needs no key; its data does. Whatever nodes or clients have said gets into it
as text alone: the page has no other way, and its policy runs no script but its own.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdbus.nodes.http.errors import JSON

from ..fleet_node import FleetNode
from ..gateway import Gateway

PAGE, DATA = "/ui", "/ui/data"
BLOCKS = ("total", "in_use", "cached", "free", "quarantined")
DETAIL_CHARS_MAX = 300
HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}


def routes(gateway: Gateway) -> list[Route]:
    html = resources.files(__package__).joinpath("ui.html").read_text(encoding="utf-8")
    headers = {**HEADERS, "content-security-policy": policy(html)}

    async def page(_: Request) -> Response:
        return Response(html, media_type="text/html", headers=headers)

    async def data(_: Request) -> Response:
        return JSON(said(gateway), headers=HEADERS)

    return [Route(PAGE, page), Route(DATA, data)]


def policy(html: str) -> str:
    """Nothing but the page's own script and style, by their hashes, and its own server's data."""
    (script,), (style,) = (re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.S) for tag in ("script", "style"))
    return (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def said(gateway: Gateway) -> dict[str, Any]:
    """All that the page shows."""
    return {
        "name": gateway.name,
        "policy": gateway.policy,
        "model": gateway.fleet.model,
        "waiting": len(gateway.waiting),
        "totals": {name: gateway.counters[name] for name in ("requests", "retries")},
        "nodes": nodes(list(gateway.fleet.nodes.values())),
        **gateway.flights.said(gateway.now_ns()),
    }


def nodes(found: Sequence[FleetNode]) -> list[dict[str, Any]]:
    """Decode nodes first, then by name."""
    return sorted(map(node, found), key=lambda row: (row["role"] == "prefill", row["name"], row["address"]))


def node(one: FleetNode) -> dict[str, Any]:
    """`state`: ready, draining, not ready, lost. Numbers are the node's own, of its last status."""
    metrics = one.status.get("metrics", {}) if one.client.reachable else {}
    why = one.status.get("not_ready") or ()
    draining = one.client.reachable and any("draining" in str(reason) for reason in why)
    lost = not one.client.reachable
    state = "ready" if one.works else "lost" if lost else "draining" if draining else "not ready"
    return {
        "name": one.name,
        "address": one.address,
        "role": one.role,
        "state": state,
        "detail": "" if one.works else one.why[:DETAIL_CHARS_MAX],
        "running": int(metrics.get("requests", 0)),
        "waiting": int(metrics.get("requests_waiting", 0)),
        "waiting_tokens": int(metrics.get("waiting_prefill_tokens", 0)),
        "leases": int(metrics.get("leases_held", 0)),
        "prefill_tokens_per_s": int(metrics.get("prefill_tokens_per_s", 0)),
        "kv": {name: int(metrics.get("kv_blocks" if name == "total" else f"kv_blocks_{name}", 0)) for name in BLOCKS},
    }
