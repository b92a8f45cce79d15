"""A folder of keys: `NAME.key` holds a secret key, `allowed` the allow-list. Nobody but its owner may look in."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils import z85

from .errors import ConfigError
from .keys import ALLOWED_BYTES_MAX, NAME, PUBLIC, AllowList, Key, parse_allowed

ALLOWED = "allowed"
SUFFIX = ".key"
SECRET_BYTES_MAX = 4096  # 64 digits and a comment
CLIENT = "client"  # whose key a client takes where a folder holds several
ALLOWED_HEAD = "# NAME ROLE PUBLIC [ADDRESS ...]: who may speak with us, and where nodes listen\n"

Stamp = tuple[int, int, int]


class OwnKey(NamedTuple):
    """A secret key as libzmq takes it (32 bytes), and the public one that belongs to it in hexadecimal."""

    name: str
    secret: bytes
    public: str

    def __repr__(self) -> str:
        return f"OwnKey({self.name}, {self.public})"  # never the secret, in no traceback and no log


class KeyFolder:
    """Checked when it is opened: raises ConfigError naming `setting` when others could read or change it."""

    def __init__(self, path: str | os.PathLike[str], *, setting: str = "--keys") -> None:
        self.path = Path(path)
        self.setting = setting
        check_private(self.path, setting, folder=True)

    @classmethod
    def create(cls, path: str | os.PathLike[str], *, setting: str = "--keys") -> KeyFolder:
        """Open it, made if there is none."""
        try:
            Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as e:
            raise ConfigError(setting, f"cannot make the folder {path}: {e.strerror}") from None
        return cls(path, setting=setting)

    def names(self) -> list[str]:
        """Whose secret keys lie here."""
        return sorted(file.name.removesuffix(SUFFIX) for file in self.path.glob(f"*{SUFFIX}"))

    def own(self, name: str) -> OwnKey:
        """The secret key of `name`. Raises ConfigError."""
        file = self._secret_file(name)
        if not file.exists():
            have = f"it has those of {', '.join(self.names())}" if self.names() else "it is empty"
            raise ConfigError(self.setting, f"{self.path} has no key of {name}: {have}; pd keys new {name} makes one")
        check_private(file, self.setting)
        digits = _without_comments(read_text(file, SECRET_BYTES_MAX, self.setting))
        if not PUBLIC.fullmatch(digits):
            raise ConfigError(self.setting, f"{file} does not hold one key of 64 hexadecimal digits")
        return _own_key(name, bytes.fromhex(digits))

    def clients(self) -> OwnKey:
        """The key that a client takes: the only one, or that of `client`. Raises ConfigError."""
        names = self.names()
        if len(names) == 1:
            return self.own(names[0])
        if not names or CLIENT in names:
            return self.own(CLIENT)
        problem = f"{self.path} has keys of {', '.join(names)}: give one, as {self.path / names[0]}{SUFFIX}"
        raise ConfigError(self.setting, problem)

    def allowed(self) -> AllowList:
        """The allow-list, empty when there is none. Raises ConfigError naming the file and the line."""
        file = self.path / ALLOWED
        try:
            there = file.exists()
        except OSError as e:
            raise ConfigError(self.setting, f"cannot read {file}: {e.strerror}") from None
        if not there:
            return AllowList(setting=str(file))
        check_private(file, self.setting)
        return parse_allowed(read_text(file, ALLOWED_BYTES_MAX, self.setting), str(file))

    def stamp(self) -> Stamp:
        """Another one whenever the allow-list may have changed."""
        try:
            found = os.stat(self.path / ALLOWED)
        except OSError:
            return (0, 0, 0)
        return (found.st_mtime_ns, found.st_size, found.st_ino)

    # ------------------------------------------------------------ changes

    def make(self, name: str, *, replace: bool = False) -> OwnKey:
        """A new secret key for `name`. Raises ConfigError when there is one, unless it is to be replaced."""
        if not NAME.fullmatch(name):
            raise ConfigError("NAME", f"{name!r:.80} is no name: give up to 64 letters, digits, . _ -")
        file = self._secret_file(name)
        if file.exists() and not replace:
            raise ConfigError("NAME", f"{file} is there already, and not on the list: remove it, then make a new one")
        _, secret = zmq.curve_keypair()
        made = _own_key(name, z85.decode(secret))
        _write(file, f"# the secret key of {name}: keep it here\n{made.secret.hex()}\n", self.setting)
        return made

    def allow(self, key: Key) -> bool:
        """Put a key on the allow-list, as the newest of its name. False when it stood there so. Raises ConfigError."""
        with self._alone():
            keys = self.allowed().keys
            if key in keys:
                return False
            self._write_allowed(*(k for k in keys if k.public != key.public), key)
            return True

    def revoke(self, *keys: Key) -> None:
        with self._alone():
            self._write_allowed(*(k for k in self.allowed().keys if k not in keys))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One change at a time, or the later one would undo the other."""
        try:
            folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as e:
            raise ConfigError(self.setting, f"cannot read {self.path}: {e.strerror}") from None
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def _write_allowed(self, *keys: Key) -> None:
        file = self.path / ALLOWED
        AllowList(keys, setting="allowed")
        _write(file, ALLOWED_HEAD + "".join(f"{key}\n" for key in keys), self.setting)

    def _secret_file(self, name: str) -> Path:
        return self.path / f"{name}{SUFFIX}"


def _own_key(name: str, secret: bytes) -> OwnKey:
    return OwnKey(name, secret, z85.decode(zmq.curve_public(z85.encode(secret))).hex())


def check_private(path: str | os.PathLike[str], setting: str, *, folder: bool = False) -> None:
    """Ours or root's, and closed to everyone else: who can write the allow-list can let himself in."""
    path = Path(path)
    try:
        found = path.stat()
    except OSError as e:
        raise ConfigError(setting, f"cannot read {path}: {e.strerror}") from None
    if folder and not path.is_dir():
        raise ConfigError(setting, f"{path} is no folder: give one made by pd keys new")
    if found.st_uid not in (0, os.geteuid()):
        raise ConfigError(setting, f"{path} belongs to another user: it must be yours")
    if found.st_mode & 0o077:
        wanted = "700" if folder else "600"
        raise ConfigError(
            setting, f"others have access to {path}, mode {found.st_mode & 0o777:o}: chmod {wanted} {path}"
        )


def read_text(file: str | os.PathLike[str], bytes_max: int, setting: str) -> str:
    """A small file. Raises ConfigError naming `setting`."""
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):  # whoever opens a pipe waits for its writer
            raise ConfigError(setting, f"{file} is no regular file")
        with open(file, "rb") as opened:
            data = opened.read(bytes_max + 1)
        if len(data) > bytes_max:
            raise ConfigError(setting, f"{file} is longer than {bytes_max} bytes")
        return data.decode()
    except OSError as e:
        raise ConfigError(setting, f"cannot read {file}: {e.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(setting, f"{file} is no text") from None


def _without_comments(text: str) -> str:
    return "".join(line.partition("#")[0].strip() for line in text.splitlines())


def _write(file: Path, text: str, setting: str) -> None:
    """Whole or not at all, whoever reads meanwhile; mode 0600."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=".", delete=False, encoding="utf-8") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(opened.name, file)
    except OSError as e:
        raise ConfigError(setting, f"cannot write {file}: {e.strerror}") from None
