"""One process's own key, whom it speaks with, and what it thinks of every message. Re-reads its allow-list."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from .errors import ConfigError
from .key_folder import SUFFIX, KeyFolder, OwnKey, Stamp
from .keys import AllowList, Key
from .messages import Message
from .roles import LOOKED_INTO, RUNS, refusal
from .wire import Header

SAY_AGAIN_S = 10.0  # one line a key in this time: a refused peer repeats itself
PUBLIC_SHOWN = 12  # digits, enough to find it on the allow-list

log = logging.getLogger("pdbus.keys")


class Grants:
    """The kinds of messages that one connection was found to be allowed, in one name, by one allow-list."""

    __slots__ = ("allowed", "kinds", "name")

    def __init__(self) -> None:
        self.start(None, "")

    def start(self, allowed: AllowList | None, name: str) -> None:
        self.allowed, self.name = allowed, name
        self.kinds: set[type[Message]] = set()


class Keyring:
    """`own` signs for us; `allowed` is as it was read last. `node`: the public key of the one node that is called,
    wherever it listens: for its own processes."""

    def __init__(self, folder: KeyFolder, own: OwnKey, *, node: str = "") -> None:
        self.own = own
        self.folder = folder
        self._node = node
        self._said: dict[str, float] = {}  # by key, '' for strangers: when it was last logged
        self._trouble = ""  # why the allow-list cannot be read now, as it was logged
        self._stamp: Stamp = folder.stamp()
        self.allowed: AllowList = folder.allowed()

    def reload(self) -> tuple[Key, ...]:
        """Read the allow-list again if it has changed. Returns the keys that no longer stand on it, or say something
        else now. Where it cannot be read, or has lost our own key (someone is writing it), the last one stays in force,
        that is logged, and it is tried again: what is wrong may be mended without a change of the text."""
        stamp = self.folder.stamp()
        if self._stamp == stamp:
            return ()
        before = self.allowed
        try:
            allowed = self.folder.allowed()
            was, now = before.get(self.own.public), allowed.get(self.own.public)
            if was and (now is None or now.name != was.name):
                raise ConfigError(str(self.folder.path), f"the key of {self.own.name} itself does not stand there")
        except ConfigError as e:
            if self._trouble != str(e):
                self._trouble = str(e)
                log.error("the allow-list stays as it was: %s", e)
            return ()
        self._stamp, self._trouble, self.allowed = stamp, "", allowed
        after = {(key.name, key.role, key.public) for key in allowed.keys}
        return tuple(key for key in before.keys if (key.name, key.role, key.public) not in after)

    # ------------------------------------------------------------ who is it?

    def is_allowed(self, public: str) -> bool:
        return self.allowed.get(public) is not None

    def keys_at(self, address: str, setting: str = "address") -> tuple[str, ...]:
        """The public keys that may answer at an address, the likeliest first. Raises ConfigError when there is none."""
        if self._node:
            return (self._node,)
        found = self.allowed.at(address)
        if not found:
            problem = f"no key of {address} in {self.folder.path}: give its node's line to pd keys allow"
            raise ConfigError(setting, problem)
        return tuple(key.public for key in found)

    # ------------------------------------------------------------ may it say that?

    def refusal(self, public: str, header: Header, message: Message, grants: Grants) -> str:
        """Why this message of whom has that key is not heard; '' when it is. `grants`: of the same connection."""
        if grants.allowed is not self.allowed or grants.name != header.from_:
            grants.start(self.allowed, header.from_)
        elif type(message) in grants.kinds:
            return ""
        problem = self._refusal(public, header, message)
        if not problem and type(message) not in LOOKED_INTO:
            grants.kinds.add(type(message))
        return problem

    def _refusal(self, public: str, header: Header, message: Message) -> str:
        key = self.allowed.get(public)
        if key is None:
            return "this key is not allowed here"
        own = key.name == self.own.name
        return refusal(key.name, key.role, header.from_, message, self.allowed.has_name, own=own)

    def may_operate(self, public: str) -> bool:
        key = self.allowed.get(public)
        return key is not None and (key.role == "operator" or key.name == self.own.name)

    def say(self, public: str, problem: str) -> None:
        """Log a refusal, not every time: all strangers together have one line in SAY_AGAIN_S, as has every other."""
        who = public if self.is_allowed(public) else ""
        now = time.monotonic()
        if now - self._said.get(who, -SAY_AGAIN_S) < SAY_AGAIN_S:
            return
        self._said[who] = now
        log.warning("refused, key %s...: %s", public[:PUBLIC_SHOWN], problem)


def node_keyring(path: str, name: str, role: str, *, setting: str = "--keys") -> Keyring:
    """What a node needs. Raises ConfigError when its key is missing, not allowed, or that of another role."""
    folder = KeyFolder(path, setting=setting)
    ring = Keyring(folder, folder.own(name))
    key = ring.allowed.get(ring.own.public)
    if key is None or key.name != name:
        raise ConfigError(setting, f"the key of {name} does not stand in {folder.path / 'allowed'}: pd keys allow it")
    if role not in RUNS.get(key.role, ()):
        raise ConfigError(setting, f"the key of {name} is {key.role}: it cannot run a {role} node")
    return ring


def client_keyring(path: str | os.PathLike[str] | Keyring, *, setting: str = "keys") -> Keyring:
    """What a client needs: from a folder, or from one `NAME.key` in it. Raises ConfigError."""
    if isinstance(path, Keyring):
        return path
    file = Path(path)
    if file.suffix == SUFFIX and not file.is_dir():
        folder = KeyFolder(file.parent, setting=setting)
        return Keyring(folder, folder.own(file.stem))
    folder = KeyFolder(file, setting=setting)
    return Keyring(folder, folder.clients())
