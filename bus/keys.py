"""Keys as text: the lines of an allow-list, and who is on it. Pure: knows neither files nor sockets.

A line is `NAME ROLE PUBLIC [ADDRESS ...]`: who it is, what it may say (roles.py), its public key as 64 hexadecimal
digits, and, of a node, the bus addresses where it listens with that key. Blank lines and what follows a `#` are
nothing. A name may have several keys, of one role: while a key is being replaced. The newest stands last.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from .errors import ConfigError
from .ports import parse_address
from .roles import NODE_ROLES, ROLES
from .wire import Declared

ALLOWED_BYTES_MAX = 4 << 20  # some 30,000 keys
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
PUBLIC = re.compile(r"[0-9a-f]{64}")


class Key(Declared):
    """One line. `public` is in hexadecimal."""

    name: str
    role: str
    public: str
    addresses: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((self.name, self.role, self.public, *self.addresses))


class AllowList:
    """Whom a process speaks with, in the order of the lines. Raises ConfigError for what cannot stand together."""

    def __init__(self, keys: Iterable[Key] = (), *, setting: str = "allowed") -> None:
        self.keys: tuple[Key, ...] = tuple(keys)
        self._by_public: dict[str, Key] = {}
        self._roles: dict[str, str] = {}
        self._by_address: dict[str, tuple[Key, ...]] = {}
        for key in self.keys:
            self._add(key, setting)

    def _add(self, key: Key, setting: str) -> None:
        if other := self._by_public.get(key.public):
            raise ConfigError(setting, f"{key.name} and {other.name} have one key: every name needs its own")
        if (role := self._roles.setdefault(key.name, key.role)) != key.role:
            raise ConfigError(setting, f"{key.name} is {role} and {key.role}: keys of one name have one role")
        self._by_public[key.public] = key
        for address in key.addresses:
            before = self._by_address.get(address, ())
            if before and before[0].name != key.name:
                problem = f"{before[0].name} and {key.name} are both said to listen at {address}"
                raise ConfigError(setting, problem)
            self._by_address[address] = (key, *before)

    def get(self, public: str) -> Key | None:
        return self._by_public.get(public)

    def has_name(self, name: str) -> bool:
        return name in self._roles

    def named(self, name: str) -> tuple[Key, ...]:
        """A name's keys, oldest first."""
        return tuple(key for key in self.keys if key.name == name)

    def at(self, address: str) -> tuple[Key, ...]:
        """With which keys someone may listen at a bus address, newest first."""
        return self._by_address.get(address, ())


def parse_allowed(text: str, setting: str) -> AllowList:
    """A whole allow-list. Raises ConfigError naming `setting` and the line."""
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        if words := line.partition("#")[0].split():
            try:
                keys.append(parse_key(" ".join(words), ""))
            except ConfigError as e:
                raise ConfigError(setting, f"line {number}: {e.problem}") from None
    return AllowList(keys, setting=setting)


def parse_key(line: str, setting: str) -> Key:
    """One line. Raises ConfigError naming `setting`."""
    words = line.split()
    if len(words) < 3:
        raise ConfigError(setting, f"must be like NAME ROLE PUBLIC [ADDRESS ...], got {line!r:.200}")
    name, role, public, *addresses = words
    if not NAME.fullmatch(name):
        raise ConfigError(setting, f"{name!r:.80} is no name: give up to 64 letters, digits, . _ -")
    if role not in ROLES:
        raise ConfigError(setting, f"{role!r:.80} is no role; there are {', '.join(ROLES)}")
    if not PUBLIC.fullmatch(public):
        raise ConfigError(setting, f"the public key of {name} must be 64 hexadecimal digits")
    if addresses and role not in NODE_ROLES:
        raise ConfigError(setting, f"{name} is {role}: only nodes listen at addresses")
    return Key(name=name, role=role, public=public, addresses=tuple(str(parse_address(a, setting)) for a in addresses))
