"""`pd keys ...`: make keys, and say who may speak with whom. Works on files alone; nodes see a change by themselves."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from pdbus.bus.errors import ConfigError
from pdbus.bus.key_folder import KeyFolder
from pdbus.bus.keys import Key, parse_key
from pdbus.bus.ports import parse_address
from pdbus.bus.roles import NODE_ROLES, ROLES

from .options import AsJson, group
from .tables import output, print_json, table

keys = group("Keys: who may speak on the bus, and what he may say.")

PUBLIC_MIN = 8  # digits that name one of several keys

Folder = Annotated[str, typer.Option("--keys", metavar="DIR", help="The folder.", envvar="PD_KEYS")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Of the node, client or person.")]


def _folder(path: str) -> KeyFolder:
    if not path:
        raise ConfigError("--keys", "say which folder: --keys DIR, or the variable PD_KEYS")
    return KeyFolder(path)


@keys.command()
def new(
    name: Name,
    *,
    role: Annotated[str, typer.Option(metavar="ROLE", help=f"{', '.join(ROLES)}.")] = "client",
    at: Annotated[list[str], typer.Option(metavar="tcp://HOST:PORT", help="Where that node's bus is called.")] = [],  # noqa: B006
    path: Folder = "",
) -> None:
    """Make a key, in a folder that is made if there is none. Prints its line, for `pd keys allow` elsewhere."""
    if role not in ROLES:
        raise ConfigError("--role", f"{role!r} is no role; there are {', '.join(ROLES)}")
    if at and role not in NODE_ROLES:
        raise ConfigError("--at", f"only nodes listen at addresses; {name} is {role}")
    addresses = tuple(str(parse_address(address, "--at")) for address in at)
    if not path:
        _folder(path)
    folder = KeyFolder.create(path)
    known = folder.allowed().named(name)
    if known:
        raise ConfigError("NAME", f"{name} is on the list already: pd keys rotate or revoke it")
    key = Key(name=name, role=role, public=folder.make(name).public, addresses=addresses)
    folder.allow(key)
    print(key)


@keys.command("list")
def list_(*, path: Folder = "", as_json: AsJson = False) -> None:
    """Show who is allowed."""
    folder = _folder(path)
    mine = {folder.own(name).public: None for name in folder.names()}
    rows = [
        {"name": k.name, "role": k.role, "public": k.public, "addresses": list(k.addresses), "ours": k.public in mine}
        for k in folder.allowed().keys
    ]
    if as_json:
        print_json(rows)
    elif rows:
        output().print(table([{**row, "addresses": " ".join(row["addresses"])} for row in rows], ()))  # type: ignore[arg-type]


@keys.command()
def allow(
    line: Annotated[
        list[str], typer.Argument(metavar="NAME ROLE PUBLIC [ADDRESS...]", help="As `pd keys new` printed it.")
    ],
    *,
    path: Folder = "",
) -> None:
    """Allow a key that was made elsewhere. A name that has one gets a second, until the old one is revoked."""
    key = parse_key(" ".join(line), "LINE")
    _tell(f"{key.name} is allowed" if _folder(path).allow(key) else f"{key.name} was allowed already")


@keys.command()
def revoke(
    name: Name,
    public: Annotated[
        str, typer.Argument(metavar="[PUBLIC]", help="First digits of the key, where the name has several.")
    ] = "",
    *,
    path: Folder = "",
) -> None:
    """Take a name, or one of its keys, off the list. Nodes that run part from it within a second or two."""
    folder = _folder(path)
    found = folder.allowed().named(name)
    if not found:
        raise ConfigError("NAME", f"{name} is not on the list of {folder.path}")
    if public:
        found = tuple(key for key in found if len(public) >= PUBLIC_MIN and key.public.startswith(public.lower()))
        if len(found) != 1:
            raise ConfigError(
                "PUBLIC", f"{public!r} is not one key of {name}: give at least {PUBLIC_MIN} digits of one"
            )
    folder.revoke(*found)
    _tell(f"revoked: {_those(found)}")


@keys.command()
def rotate(name: Name, *, path: Folder = "") -> None:
    """Replace the secret key of a name. What runs keeps the old one until it is started again, and both are allowed
    until the old one is revoked. Prints the new line."""
    folder = _folder(path)
    known = folder.allowed().named(name)
    if not known or name not in folder.names():
        raise ConfigError("NAME", f"{folder.path} has no key of {name} that is on its list: pd keys new {name}")
    last = known[-1]
    key = Key(name=name, role=last.role, public=folder.make(name, replace=True).public, addresses=last.addresses)
    folder.allow(key)
    print(key)
    where = f" --keys {shlex.quote(path)}" if path else ""
    revoke = f"pd keys revoke {name} {last.public[:16]}{where}"
    _tell(f"allow it wherever {name} is known, start {name} again, then: {revoke}")


def _those(found: Sequence[Key]) -> str:
    return ", ".join(f"{key.name} {key.public[:16]}" for key in found)


def _tell(text: str) -> None:
    print(text, file=sys.stderr)
