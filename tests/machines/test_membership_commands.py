"""An operator's last word on a member holds, whatever happens around it."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from pdbus.bus import members as ms

from tests.fake_net import Net, Node

PREFILL = ("p1", "p2")
SETTLE_S = 400  # a removal waits 120 s, a refusal 30 s, an idle link is looked at after a minute
ADDRESSES = ("tcp://{}:7400", "tcp://{}.alias:7400")

Step = tuple[str, str, str]


class Commanded(Node):
    """The decode node. What was last asked of it for a peer counts, unless it said no."""

    wanted: dict[str, str]

    def handle(self, event: ms.MembershipEvent) -> list[ms.MembershipEffect]:
        known_at = {a: p.name for p in self.machine.members() for a in (p.address, p.called_at, *p.aliases)}
        effects = super().handle(event)
        if self.frozen or any(isinstance(e, ms.Rejected) for e in effects):
            return effects
        match event:
            case ms.JoinAsked(address=address):
                self.wanted[_named(address)] = "up"
            case ms.RemoveAsked(target=target) if ".alias" in target and not known_at.get(target):
                self.wanted.pop(_named(target), None)  # nobody has answered there: whose address it is is not known
            case ms.RemoveAsked(target=target):
                self.wanted[_named(target)] = "removed"
        return effects


def _named(target: str) -> str:
    return re.findall(r"p\d", target)[0]


class Play:
    def __init__(self) -> None:
        self.net = Net()
        self.d = Commanded(self.net, "d", "decode")
        self.d.wanted = {}
        self.lives = dict.fromkeys(PREFILL, 0)
        self.prefill: dict[str, Node] = {}
        for name in PREFILL:
            self.start(name)

    def start(self, name: str) -> None:
        self.lives[name] += 1
        node = self.prefill[name] = Node(self.net, name, "prefill", life=self.lives[name])
        self.net.at[ADDRESSES[1].format(name)] = node

    def alive(self, name: str) -> bool:
        return self.net.at.get(self.prefill[name].address) is self.prefill[name]

    def step(self, what: str, name: str, how: str) -> None:
        d, net, p = self.d, self.net, self.prefill[name]
        match what:
            case "join":
                d.handle(ms.JoinAsked(address=how.format(name)))
            case "remove":
                d.handle(ms.RemoveAsked(target=how.format(name)))
            case "called" if self.alive(name):
                p.handle(ms.JoinAsked(address=d.address))
            case "busy":
                d.handle(ms.BusyChanged(peer=name, busy=bool(how)))
            case "die" if self.alive(name):
                p.die()
            case "restart":
                self.start(name)
            case "cut":
                peer = d.machine.peer(name)
                if peer is not None and peer.link.startswith("out"):
                    d.handle(ms.LinkLost(link=peer.link))
            case "deaf":
                net.drop = lambda node, message: node.name == name
            case "hearing":
                net.drop = lambda node, message: False
            case "slow":
                net.slow_down()
            case "fast":
                net.catch_up()
            case "freeze":
                d.frozen = True
            case "thaw":
                d.thaw()
            case "wait":
                net.run(float(how))
        net.deliver()

    def settle(self) -> None:
        for what in ("thaw", "fast", "hearing"):
            self.step(what, "p1", "")
        for name in PREFILL:
            if not self.alive(name):
                self.start(name)
            self.d.handle(ms.BusyChanged(peer=name, busy=False))
        self.net.run(SETTLE_S)

    def check(self) -> None:
        asked = {peer.name: peer.incarnation for peer in self.d.machine.prefill_peers()}
        for name, state in self.d.wanted.items():
            here, there = self.d.state_of(name), self.prefill[name].state_of("d")
            if state == "up":
                assert here == "up" and asked.get(name) == self.prefill[name].incarnation
            else:  # who was removed before it was known calls under a name that is refused
                assert here in ("removed", "refused", "unknown") and name not in asked
            assert (there == "up") == (state == "up"), f"{name} takes d to be {there}"


commands = st.one_of(
    st.tuples(st.just("join"), st.sampled_from(PREFILL), st.sampled_from(ADDRESSES)),
    st.tuples(st.just("remove"), st.sampled_from(PREFILL), st.sampled_from(("{}", *ADDRESSES))),
)
trouble = st.one_of(
    st.tuples(st.sampled_from(("called", "die", "restart", "cut", "deaf")), st.sampled_from(PREFILL), st.just("")),
    st.tuples(st.just("busy"), st.sampled_from(PREFILL), st.sampled_from(("", "yes"))),
    st.tuples(st.sampled_from(("hearing", "slow", "fast", "freeze", "thaw")), st.just("p1"), st.just("")),
    st.tuples(st.just("wait"), st.just("p1"), st.sampled_from(("0.01", "2", "8", "70", "130"))),
)


@settings(max_examples=300)
@given(st.lists(st.one_of(commands, trouble), max_size=16))
def test_the_last_command_holds(steps: list[Step]) -> None:
    """Under whichever of a member's names and addresses it was given; and the member knows it, too."""
    play = Play()
    for step in steps:
        play.step(*step)
    play.settle()
    play.check()
