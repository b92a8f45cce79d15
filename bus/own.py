"""What this node says of itself to members: its hello, the agents behind it, its load, and that it drains."""

from __future__ import annotations

from .members import OwnAgentChanged, OwnLoadChanged
from .messages import Agent, Drain, Heartbeat, Hello, Message
from .wire import replace


class Own:
    """Only Membership changes it."""

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        self.draining = False
        self._agents: dict[int, Agent] = {}  # of the present epoch, by rank
        self._load = Heartbeat()

    def change_agent(self, event: OwnAgentChanged) -> bool:
        """The first agent of a higher epoch ends those of the one before. False, and nothing changes: its epoch is
        over."""
        agent = event.agent
        if agent.epoch < self.hello.epoch:
            return False
        if agent.epoch > self.hello.epoch:
            self._agents.clear()
            self.hello = replace(self.hello, epoch=agent.epoch)
        self._agents[agent.rank] = agent
        return True

    def change_load(self, event: OwnLoadChanged) -> None:
        self._load = Heartbeat(
            waiting_prefill_tokens=event.waiting_prefill_tokens,
            running=event.running,
            free_blocks=event.free_blocks,
            prefill_tokens_per_s=event.prefill_tokens_per_s,
            prefill_step_us=event.prefill_step_us,
        )

    def after_welcome(self) -> list[Message]:
        """What a new member has to know beside our hello: our agents, and that we drain."""
        agents: list[Message] = [self._agents[rank] for rank in sorted(self._agents)]
        return agents + ([Drain()] if self.draining else [])

    def heartbeat(self, *, reply: bool = False) -> Heartbeat:
        """`reply`: that one is asked for."""
        return replace(self._load, reply=reply, epoch=self.hello.epoch if self._agents else 0)
