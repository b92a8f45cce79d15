"""Does it still live? What a peer's words, its silence and a cut connection say, and what follows.

Theory of operation. A peer is judged only along links in use: we ping, and any message counts. Silence is our
judgement alone. It makes a peer suspect, then dead: not chosen, called anew, and never a reason to end a lease. A pause
of our own is not the peer's silence. A cut connection makes a peer suspect at once and starts the pings. A peer that
the shell itself watches is left alone.
"""

from __future__ import annotations

from . import members as ms
from .commands import Commands
from .dials import Dials, DialState
from .known import DEAD, LIVE, REMOVING, UP, Known
from .own import Own
from .roster import Roster


class Liveness:
    """Keeps nothing of its own: each peer knows its silence (known.py). Only Membership calls it."""

    def __init__(self, config: ms.MembershipConfig, own: Own, roster: Roster, dials: Dials, commands: Commands) -> None:
        self._config = config
        self._own = own
        self._roster = roster
        self._dials = dials
        self._commands = commands

    # ------------------------------------------------------------ links in use

    def busy_changed(self, event: ms.BusyChanged, now_ns: int) -> list[ms.MembershipEffect]:
        known = self._roster.get(event.peer)
        if known is None or known.busy == event.busy:
            return [ms.rejected(event, "no such peer" if known is None else "no change")]
        if event.busy:
            known.use(now_ns)
        else:
            known.use_until_ns = now_ns + self._config.in_use_ns
        known.busy = event.busy
        return self._commands.removed(known) if known.state is REMOVING and not event.busy else []

    def watch_changed(self, event: ms.WatchChanged, now_ns: int) -> list[ms.MembershipEffect]:
        known = self._roster.get(event.peer)
        if known is None or known.state is not UP or known.watched == event.watched:
            return [ms.rejected(event, "no change, or no peer that is up")]
        if not event.watched:
            known.forgive(now_ns)
            return known.unwatch()
        known.watched = True
        return [ms.PeerWatched(peer=known.record(), watched=True)]

    # ------------------------------------------------------------ signs of life

    def heard(self, known: Known, link: str, now_ns: int) -> list[ms.MembershipEffect]:
        """It lives. One judged dead is up again where it calls us, else it is called anew at once."""
        known.heard(now_ns)
        if link != known.out:
            known.inn = link
        if known.state is UP:
            return []
        dial = self._dials.named(known.name) if known.state is DEAD else None
        if dial is None:
            return known.announce("heard")
        if dial.state is DialState.WAITING:
            dial.due_ns = min(dial.due_ns, now_ns)
        return []

    # ------------------------------------------------------------ silence

    def forgive(self, now_ns: int) -> None:
        """It was us who paused: nobody's silence counts before now."""
        for known in self._roster.all():
            known.forgive(now_ns)

    def look(self, now_ns: int) -> list[ms.MembershipEffect]:
        """Ping who owes us a word, and judge who has owed one for too long."""
        return [e for known in self._roster.all() if known.state in LIVE for e in self._look_at(known, now_ns)]

    def _look_at(self, known: Known, now_ns: int) -> list[ms.MembershipEffect]:
        if known.watched:
            return []
        if known.state is REMOVING and now_ns >= known.remove_ns:
            return self._commands.removed(known)
        if not known.in_use(now_ns):
            known.ping_ns = max(known.ping_ns, known.use_until_ns)  # no ping is owed for a use that is over
            if now_ns < known.last_heard_ns + self._config.idle_ns:
                return []
            known.use_for(now_ns, self._config.dead_ns + self._config.heartbeat_ns)
        silent_ns = now_ns - known.silent_since_ns
        if known.cut_since_ns is not None and now_ns >= known.cut_since_ns + self._config.cut_ns:
            return self.lost(known, "the connection was cut and nothing has been heard since", now_ns)
        if silent_ns >= self._config.dead_ns:
            return self.lost(known, f"silent for {silent_ns / 1e9:.1f} s", now_ns)
        if silent_ns >= self._config.suspect_ns:
            known.move("silent", f"silent for {silent_ns / 1e9:.1f} s")
        if now_ns < known.ping_ns:
            return []
        known.ping_ns = now_ns + self._config.heartbeat_ns
        return [known.say(known.link, self._own.heartbeat(reply=True))]

    def cut(self, known: Known, reason: str, now_ns: int) -> list[ms.MembershipEffect]:
        """Our connection to it is gone: ask at once whether it still is there."""
        unwatched = known.unwatch()
        known.move("cut", reason)
        known.use_for(now_ns, self._config.in_use_ns)
        known.cut(now_ns)
        return unwatched

    def lost(self, known: Known, reason: str, now_ns: int) -> list[ms.MembershipEffect]:
        """Our judgement only: nothing is proven."""
        if known.state is REMOVING:
            return self._commands.removed(known)
        unwatched = known.unwatch()
        known.move("lost", reason)
        return unwatched + self.down(known, reason, False, now_ns)

    def down(self, known: Known, reason: str, proven: bool, now_ns: int) -> list[ms.MembershipEffect]:
        """Its state says so already. `proven`: by the peer itself."""
        effects = ms.closing(known.out)
        dial = self._dials.on(known.out)
        if dial is not None:
            self._dials.fail(dial, reason, now_ns)
        known.out = ""
        return [*effects, ms.PeerDown(peer=known.record(), reason=reason, proven=proven)]
