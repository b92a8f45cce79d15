"""Folders of keys, as `pd keys` leaves them and as nodes and clients open them."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pdbus.bus.client import Client
from pdbus.bus.errors import ConfigError
from pdbus.bus.key_folder import KeyFolder
from pdbus.bus.keyring import client_keyring, node_keyring
from pdbus.bus.keys import Key
from pdbus.nodes import cli

from tests.key_folders import key_folder, keyring

AT = "tcp://10.0.0.1:7400"


def pd(*words: str, keys: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """`pd keys ...` with PD_KEYS: exit status, and what was printed on both."""
    monkeypatch.setenv("PD_KEYS", str(keys))
    monkeypatch.setattr(sys, "argv", ["pd", "keys", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out + said.err


# ---------------------------------------------------------------- the folder


def test_nobody_else_can_read_what_was_made(tmp_path: Path) -> None:
    folder = key_folder(tmp_path / "keys", {"alice": "client"})
    modes = {file.name: oct(file.stat().st_mode & 0o777) for file in (folder.path, *folder.path.iterdir())}
    assert modes == {"keys": "0o700", "alice.key": "0o600", "allowed": "0o600"}


@pytest.mark.parametrize(
    ("what", "mode", "wanted"), [("", 0o750, 700), ("alice.key", 0o640, 600), ("allowed", 0o666, 600)]
)
def test_a_folder_that_others_can_look_into_is_refused(tmp_path: Path, what: str, mode: int, wanted: int) -> None:
    path = key_folder(tmp_path / "keys", {"alice": "client"}).path
    (path / what).chmod(mode)
    with pytest.raises(ConfigError) as caught:
        client_keyring(path, setting="--keys")
    assert (
        str(caught.value) == f"--keys: others have access to {path / what}, mode {mode:o}: chmod {wanted} {path / what}"
    )


def test_a_secret_is_in_no_text_of_it(tmp_path: Path) -> None:
    own = key_folder(tmp_path / "keys", {"alice": "client"}).own("alice")
    assert own.secret.hex() not in f"{own} {own!r}" and own.public in repr(own)


@pytest.mark.parametrize("text", ["", "00", "z" * 64, "a" * 5000])
def test_a_file_that_holds_no_key_is_refused_without_being_shown(tmp_path: Path, text: str) -> None:
    folder = key_folder(tmp_path / "keys", {"alice": "client"})
    (folder.path / "alice.key").write_text(text)
    with pytest.raises(ConfigError, match=r"^--keys: .*alice\.key") as caught:
        folder.own("alice")
    assert len(text) < 3 or text not in str(caught.value)


def test_a_client_takes_the_only_key_or_that_of_client_or_the_one_it_is_given(tmp_path: Path) -> None:
    folder = key_folder(tmp_path / "keys", {"ops": "operator"})
    assert client_keyring(folder.path).own.name == "ops"
    key_folder(folder.path, {"d1": "decode"})
    with pytest.raises(ConfigError, match=r"has keys of d1, ops: give one, as .*d1\.key"):
        client_keyring(folder.path)
    assert client_keyring(folder.path / "ops.key").own.name == "ops"
    key_folder(folder.path, {"client": "client"})
    assert client_keyring(folder.path).own.name == "client"


def test_a_client_without_a_folder_is_told_so() -> None:
    with pytest.raises(ConfigError, match=r"^keys: cannot read /nowhere: No such file"):
        Client("tcp://127.0.0.1:7400", keys="/nowhere")


def test_a_node_needs_a_key_of_its_name_and_role_that_is_allowed(tmp_path: Path) -> None:
    folder = key_folder(tmp_path / "keys", {"p1": "prefill", "n1": "both"})
    assert node_keyring(str(folder.path), "p1", "prefill").own.name == "p1"
    assert node_keyring(str(folder.path), "n1", "decode").own.name == "n1"
    with pytest.raises(ConfigError, match=r"has no key of d1: it has those of n1, p1; pd keys new d1 makes one"):
        node_keyring(str(folder.path), "d1", "decode")
    with pytest.raises(ConfigError, match="the key of p1 is prefill: it cannot run a decode node"):
        node_keyring(str(folder.path), "p1", "decode")
    folder.revoke(*folder.allowed().named("p1"))
    with pytest.raises(ConfigError, match=r"the key of p1 does not stand in .*allowed"):
        node_keyring(str(folder.path), "p1", "prefill")


def test_a_list_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """A node may read it at any moment."""
    folder = key_folder(tmp_path / "keys", {"alice": "client"})
    before = os.stat(folder.path / "allowed").st_ino
    folder.revoke(*folder.allowed().named("alice"))
    assert os.stat(folder.path / "allowed").st_ino != before
    assert [file.name for file in folder.path.iterdir() if file.name.startswith(".")] == []


def test_changes_at_the_same_time_all_count(tmp_path: Path) -> None:
    """As when a script allows many at once."""
    path = key_folder(tmp_path / "keys", {}).path
    names = [f"n{i}" for i in range(16)]

    def allow(name: str) -> None:
        KeyFolder(path).allow(Key(name=name, role="client", public=name[1:].zfill(64)))

    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(allow, names))
    assert sorted(key.name for key in KeyFolder(path).allowed().keys) == sorted(names)


@pytest.mark.parametrize("text", ["", "bob client nonsense", None], ids=["emptied", "no list", "gone"])
def test_a_list_that_someone_is_writing_leaves_the_last_in_force(tmp_path: Path, text: str | None) -> None:
    """An editor empties a file, or takes it away, before it writes: that must not cut everyone off."""
    folder = key_folder(tmp_path / "keys", {"p1": "prefill", "alice": "client"})
    ring, file = keyring(folder, "p1"), folder.path / "allowed"
    file.unlink() if text is None else file.write_text(text)
    assert ring.reload() == () and ring.is_allowed(folder.own("alice").public)
    assert ring.reload() == ()
    file.unlink(missing_ok=True)
    folder.allow(Key(name="p1", role="prefill", public=folder.own("p1").public))
    assert [key.name for key in ring.reload()] == ["alice"] and not ring.is_allowed(folder.own("alice").public)


def test_a_list_is_tried_again_after_what_kept_it_from_being_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else who was taken off it would stay in for ever: chmod does not change a file's time."""
    folder = key_folder(tmp_path / "keys", {"p1": "prefill", "alice": "client"})
    ring, file = keyring(folder, "p1"), folder.path / "allowed"
    file.write_text(f"{folder.allowed().named('p1')[0]}\n")
    file.chmod(0o644)
    assert ring.reload() == () == ring.reload()
    assert caplog.text.count("others have access") == 1
    file.chmod(0o600)
    assert [key.name for key in ring.reload()] == ["alice"]


# ---------------------------------------------------------------- pd keys


def test_a_key_made_here_is_allowed_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The printed line is all that has to travel."""
    here, there = tmp_path / "here", tmp_path / "there"
    code, line = pd("new", "p1", "--role", "prefill", "--at", AT, keys=here, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0 and line.split()[:2] == ["p1", "prefill"] and line.split()[3] == AT
    KeyFolder.create(there)
    assert pd("allow", *line.split(), keys=there, monkeypatch=monkeypatch, capsys=capsys) == (0, "p1 is allowed\n")
    assert (
        pd("allow", line.strip(), keys=there, monkeypatch=monkeypatch, capsys=capsys)[1] == "p1 was allowed already\n"
    )
    assert KeyFolder(there).allowed().keys == KeyFolder(here).allowed().keys
    assert KeyFolder(there).names() == []


def test_a_key_is_replaced_in_three_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = key_folder(tmp_path / "keys", {"p1": "prefill"}, {"p1": AT})
    old = folder.allowed().keys[0]
    code, said = pd("rotate", "p1", keys=folder.path, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0 and f"pd keys revoke p1 {old.public[:16]} --keys {folder.path}" in said
    assert [key.public for key in folder.allowed().at(AT)] == [folder.own("p1").public, old.public]
    code, _ = pd("revoke", "p1", old.public[:16], keys=folder.path, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0 and [key.public for key in folder.allowed().keys] == [folder.own("p1").public]


def test_list_shows_everyone_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = key_folder(tmp_path / "keys", {"p1": "prefill", "alice": "client"}, {"p1": AT})
    code, said = pd("list", "--json", keys=folder.path, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0 and all(word in said for word in ("p1", "alice", AT, folder.own("alice").public))
    assert folder.own("alice").secret.hex() not in said


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("new", "two words"), "NAME: 'two words' is no name"),
        (("new", "x", "--role", "boss"), "--role: 'boss' is no role; there are observer"),
        (("new", "x", "--at", AT), "--at: only nodes listen at addresses; x is client"),
        (("new", "x", "--role", "prefill", "--at", "10.0.0.1"), "--at: must be like tcp://host:port"),
        (("new", "alice"), "NAME: alice is on the list already: pd keys rotate or revoke it"),
        (("allow", "alice"), "LINE: must be like NAME ROLE PUBLIC"),
        (("revoke", "nobody"), "NAME: nobody is not on the list of"),
        (("revoke", "alice", "00"), "PUBLIC: '00' is not one key of alice"),
        (("rotate", "bob"), "NAME: "),
    ],
)
def test_bad_input_is_one_line_and_exit_status_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    problem: str,
) -> None:
    folder = key_folder(tmp_path / "keys", {"alice": "client"})
    before = (folder.path / "allowed").read_text()
    code, said = pd(*words, keys=folder.path, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 2 and said.startswith(f"pd: {problem}") and said.count("\n") == 1
    assert (folder.path / "allowed").read_text() == before


def test_a_pipe_is_no_key_file(tmp_path: Path) -> None:
    """Whoever opened it would wait for its writer for ever."""
    folder = key_folder(tmp_path / "keys", {"p1": "prefill"})
    (folder.path / "allowed").unlink()
    os.mkfifo(folder.path / "allowed", 0o600)
    with pytest.raises(ConfigError, match="allowed is no regular file"):
        folder.allowed()
