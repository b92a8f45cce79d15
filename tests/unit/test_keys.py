"""Allow-lists as text, and who may say what."""

from __future__ import annotations

import pytest

from pdbus.bus.errors import ConfigError
from pdbus.bus.keys import AllowList, Key, parse_allowed, parse_key
from pdbus.bus.messages import MESSAGES, Drain, Generate, Hello, Message, Published, Status, Token
from pdbus.bus.roles import MAY_SEND, NODE_ROLES, refusal

A, B, C = "a" * 64, "b" * 64, "c" * 64
AT = "tcp://10.0.0.1:7400"


def test_a_list_is_read_as_it_is_written() -> None:
    keys = (
        Key(name="p1", role="prefill", public=A, addresses=(AT, "tcp://[::1]:7400")),
        Key(name="alice", role="client", public=B),
    )
    assert parse_allowed("\n".join(map(str, keys)), "allowed").keys == keys


def test_comments_and_blank_lines_are_nothing() -> None:
    assert parse_allowed(f"# who\n\n  alice   client {A}  # she\n", "f").keys == (
        Key(name="alice", role="client", public=A),
    )


def test_the_newest_of_several_keys_is_the_likeliest_at_an_address() -> None:
    listed = parse_allowed(f"p1 prefill {A} {AT}\np1 prefill {B} {AT}\n", "f")
    assert [key.public for key in listed.at(AT)] == [B, A]
    assert [key.public for key in listed.named("p1")] == [A, B]
    assert listed.at("tcp://10.0.0.2:7400") == ()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("alice client", "line 1: must be like NAME ROLE PUBLIC"),
        (f"\nalice boss {A}", "line 2: 'boss' is no role"),
        (f"al/ice client {A}", "line 1: 'al/ice' is no name"),
        (f"alice client {A[:-1]}", "line 1: the public key of alice must be 64 hexadecimal digits"),
        (f"alice client {A.upper()}", "line 1: the public key of alice must be 64 hexadecimal digits"),
        (f"alice client {A} {AT}", "line 1: alice is client: only nodes listen"),
        (f"p1 prefill {A} 10.0.0.1", "line 1: must be like tcp://host:port"),
        (f"alice client {A}\nbob client {A}", "bob and alice have one key"),
        (f"p1 prefill {A}\np1 decode {B}", "p1 is prefill and decode"),
        (f"p1 prefill {A} {AT}\np2 prefill {B} {AT}", f"p1 and p2 are both said to listen at {AT}"),
    ],
)
def test_what_is_no_list_is_refused_by_file_and_line(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=r"^allowed: ") as caught:
        parse_allowed(text, "allowed")
    assert problem in str(caught.value)


def test_a_line_names_the_setting_that_it_came_from() -> None:
    with pytest.raises(ConfigError, match=r"^LINE: "):
        parse_key("p1", "LINE")


# ---------------------------------------------------------------- roles


def why(role: str, message: Message, *, name: str = "me", says: str = "me", own: bool = False) -> str:
    return refusal(name, role, says, message, AllowList((Key(name="d1", role="decode", public=C),)).has_name, own=own)


def test_every_kind_of_message_may_be_sent_by_someone() -> None:
    """But for what travels on PUB alone. A kind that nobody may send would be dead as soon as keys are used."""
    sent = frozenset().union(*MAY_SEND.values())
    assert set(MESSAGES.values()) - sent == {Published}


@pytest.mark.parametrize("role", ["observer", "client", "operator"])
def test_who_is_no_node_says_nothing_that_only_nodes_say(role: str) -> None:
    nodes = frozenset().union(*(MAY_SEND[node] for node in NODE_ROLES)) - MAY_SEND["observer"] - {Drain}
    assert not MAY_SEND[role] & nodes


def test_roles_of_people_rise() -> None:
    assert MAY_SEND["observer"] < MAY_SEND["client"] < MAY_SEND["operator"]
    assert why("observer", Generate(client_id="1")) == "the key of me is observer: it may not send generate"
    assert why("client", Generate(client_id="1")) == "" == why("operator", Drain())


def test_a_client_calls_itself_what_it_likes_but_not_by_anothers_name() -> None:
    assert why("client", Status(), says="client-1") == ""
    assert why("client", Status(), says="d1") == "the key of me cannot speak for 'd1'"


def test_a_node_speaks_in_its_own_name_alone() -> None:
    assert why("decode", Token(client_id="1", request=b"", index=0, tokens=b"")) == ""
    assert why("decode", Hello(role="decode"), says="other") == (
        "the key of me is decode: it speaks for me alone, not for 'other'"
    )


def test_a_nodes_own_http_process_operates_it() -> None:
    assert why("decode", Drain(), says="client-1", own=True) == ""
    assert why("decode", Drain(), says="d1", own=True) != ""
