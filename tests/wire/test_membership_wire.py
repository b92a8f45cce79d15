"""Membership over real endpoints: the shell is a few lines, the connections are ZeroMQ's."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from pdbus.bus import members as ms
from pdbus.bus.endpoint import Endpoint, Received
from pdbus.bus.errors import ConfigError
from pdbus.bus.membership import Membership
from pdbus.bus.messages import Agent, Heartbeat, Hello, Refused, Welcome
from pdbus.bus.wire import replace
from pdbus.connector.layout import geometry_for
from pdbus.connector.readable import unreadable

from tests.loop import on_loop, until

GEOMETRY = geometry_for(1, 1, 4, 16, "float32")
ANY_PORT = "tcp://127.0.0.1:0"


class Shell:
    """One life of a node that does nothing but know its peers."""

    def __init__(self, name: str, role: str, life: int = 1, address: str = ANY_PORT, **hello: Any) -> None:
        incarnation = f"{name}#{life}".encode().ljust(16, b".")
        self.endpoint = Endpoint(name, incarnation, self.hear, on_link_lost=self.lost)
        self.address = self.endpoint.bind(address)
        fields: dict[str, Any] = {"geometry": GEOMETRY, **hello}
        own = Hello(role=role, address=self.address, **fields)
        config = ms.MembershipConfig(
            name=name, incarnation=incarnation, hello=own, heartbeat_ns=50_000_000, suspect_ns=200_000_000,
            dead_ns=400_000_000, handshake_ns=500_000_000,
        )  # fmt: skip
        self.machine = Membership(config, unreadable)
        self.effects: list[ms.MembershipEffect] = []
        self.timer: asyncio.TimerHandle | None = None

    def hear(self, received: Received) -> None:
        self.handle(ms.event_of(received.link, received.header, received.message))

    def lost(self, link: str) -> None:
        self.handle(ms.LinkLost(link=link))

    def handle(self, event: ms.MembershipEvent) -> None:
        for effect in self.machine.handle(event, time.monotonic_ns()):
            self.effects.append(effect)
            self.perform(effect)
        if self.timer is not None:
            self.timer.cancel()
        due = self.machine.next_deadline()
        if due is not None:
            wait_s = max(0, due - time.monotonic_ns()) / 1e9
            self.timer = asyncio.get_running_loop().call_later(wait_s, self.handle, ms.Tick())

    def perform(self, effect: ms.MembershipEffect) -> None:
        match effect:
            case ms.OpenLink(address=address):
                try:
                    link = self.endpoint.connect(address)
                except ConfigError as e:
                    self.handle(ms.LinkFailed(address=address, problem=str(e)))
                else:
                    self.handle(ms.LinkOpened(link=link, address=address))
            case ms.CloseLink(link=link, flush=flush):
                self.endpoint.close_link(link, linger_ms=200 if flush else 0)
            case ms.SendOn() as send:
                self.endpoint.send(send.link, send.message, cause=send.cause, to=send.to, to_inc=send.to_inc)

    def join(self, other: Shell) -> None:
        self.handle(ms.JoinAsked(address=other.address))

    def up(self) -> list[tuple[str, bytes]]:
        return [(p.name, p.incarnation) for p in self.machine.prefill_peers()]

    def close(self, linger_ms: int = 0) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self.endpoint.close(linger_ms=linger_ms)


@on_loop
async def test_a_pair_that_joins_has_links_and_agents() -> None:
    p, d = Shell("p", "prefill"), Shell("d", "decode")
    p.handle(ms.OwnAgentChanged(agent=Agent(epoch=1, metadata=b"m" * 3000)))
    p.join(d)
    await until(lambda: d.machine.prefill_peers() and d.machine.prefill_peers()[0].agents)
    (agent,) = d.machine.prefill_peers()[0].agents
    assert len(agent.metadata) == 3000
    for shell in (p, d):
        shell.close()


@on_loop
async def test_a_node_killed_and_back_on_its_port_is_up_again_without_touching_the_other() -> None:
    p, d = Shell("p", "prefill"), Shell("d", "decode")
    d.join(p)
    await until(d.up)
    p.close()
    await until(lambda: not d.up())
    successor = Shell("p", "prefill", life=2, address=p.address)
    await until(lambda: d.up() == [("p", successor.endpoint.incarnation)])
    for shell in (successor, d):
        shell.close()


@on_loop
async def test_a_node_restarted_at_once_is_noticed_by_its_connection_alone() -> None:
    p, d = Shell("p", "prefill"), Shell("d", "decode")
    d.join(p)
    await until(d.up)
    p.close()
    successor = Shell("p", "prefill", life=2, address=p.address)
    await until(lambda: d.up() == [("p", successor.endpoint.incarnation)])
    assert any(isinstance(e, ms.PeerDown) and e.proven for e in d.effects)
    for shell in (successor, d):
        shell.close()


@on_loop
async def test_goodbye_arrives_before_the_sockets_close() -> None:
    p, d = Shell("p", "prefill"), Shell("d", "decode")
    d.join(p)
    await until(d.up)
    p.handle(ms.Leaving(reason="shutdown"))
    p.close(linger_ms=500)
    await until(lambda: any(isinstance(e, ms.PeerDown) and e.proven for e in d.effects))
    d.close()


@on_loop
async def test_a_pair_that_cannot_work_is_refused_with_both_values_and_others_go_on() -> None:
    p, odd, d = (
        Shell("p", "prefill"),
        Shell("odd", "prefill", geometry=replace(GEOMETRY, head_dim=8)),
        Shell("d", "decode"),
    )
    d.join(p)
    d.join(odd)
    await until(lambda: d.up() and any(m.reason for m in d.machine.members()))
    reason = next(m.reason for m in d.machine.members() if m.name == "odd")
    assert reason == "cannot share KV: head_dim 4 against 8"
    assert [name for name, _ in d.up()] == ["p"]
    for shell in (p, odd, d):
        shell.close()


@on_loop
async def test_a_tool_is_welcomed_and_its_pings_are_answered() -> None:
    d = Shell("d", "decode")
    tool = Endpoint("tool", bytes(16), lambda received: None)
    link = tool.connect(d.address)
    welcome = await tool.ask(link, Hello(role="tool"), (Welcome, Refused), 5)
    assert isinstance(welcome.message, Welcome)
    assert welcome.header.from_ == "d"
    assert await tool.request(link, Heartbeat(reply=True), Heartbeat, 5)
    assert d.machine.members() == []
    tool.close()
    d.close()
