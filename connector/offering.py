"""What follows from what `Offers` decides: words and news of leases. What computes the prompts is for subclasses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from .events import AdvertiseLeases, NodeEffect, Send, lease_event
from .handoff import Answer, LeaseBegan, LeaseEnded, OfferEffect, OfferEvent, StartPrefill, StopPrefill
from .offer import Offers
from .tally import Tally


class Offering(ABC):
    def __init__(self, offers: Offers) -> None:
        self._offers = offers
        self._leases = Tally()  # that each decode node holds

    def handle(self, event: OfferEvent, now: int) -> list[NodeEffect]:
        """Let the offering half decide, and carry out what it decides."""
        out: list[NodeEffect] = []
        held = self._offers.held()
        queue: list[OfferEvent] = [event]
        while queue:
            for effect in self._offers.handle(queue.pop(0), now):
                self._carry_out(effect, now, out, queue)
        if self._offers.held() != held:
            out.append(AdvertiseLeases(leases=self._offers.held()))
        return out

    def readers(self) -> Mapping[str, int]:
        """How many leases each decode node holds that holds any, now."""
        return self._leases

    def _carry_out(self, effect: OfferEffect, now: int, out: list[NodeEffect], queue: list[OfferEvent]) -> None:
        match effect:
            case Answer():
                out.append(Send(link=effect.link, to=effect.to, to_inc=effect.to_inc, message=effect.message))
            case StartPrefill():
                self._start(effect, now, out, queue)
            case StopPrefill():
                self._stop(effect, out, queue)
            case LeaseBegan():
                self._leases.more(effect.try_.node)
                out.append(lease_event("lease.began", effect, blocks=effect.blocks))
            case LeaseEnded():
                self._leases.less(effect.try_.node)
                out.append(lease_event("lease.ended", effect, cause=str(effect.cause), held_ns=effect.held_ns))
                self._lease_ended(effect)

    # ------------------------------------------------------------ for who computes; `queue` is heard next

    @abstractmethod
    def _start(self, start: StartPrefill, now: int, out: list[NodeEffect], queue: list[OfferEvent]) -> None: ...

    @abstractmethod
    def _stop(self, stop: StopPrefill, out: list[NodeEffect], queue: list[OfferEvent]) -> None: ...

    def _lease_ended(self, ended: LeaseEnded) -> None:  # noqa: B027 (most have nothing more to do)
        """Its blocks are no longer held for a reader."""
