"""Folders of keys for tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pdbus.bus.key_folder import KeyFolder
from pdbus.bus.keyring import Keyring
from pdbus.bus.keys import Key


def key_folder(path: Path, roles: Mapping[str, str], addresses: Mapping[str, str] | None = None) -> KeyFolder:
    """A folder with a key for each name, all on its allow-list; `addresses` of those that listen somewhere."""
    folder = KeyFolder.create(path)
    for name, role in roles.items():
        at = (addresses or {}).get(name)
        folder.allow(Key(name=name, role=role, public=folder.make(name).public, addresses=(at,) if at else ()))
    return folder


def keyring(folder: KeyFolder, name: str) -> Keyring:
    return Keyring(folder, folder.own(name))


def listens(folder: KeyFolder, name: str, *addresses: str) -> None:
    """Says on the allow-list where the newest key of that name listens."""
    key = folder.allowed().named(name)[-1]
    folder.allow(Key(name=name, role=key.role, public=key.public, addresses=addresses))
