"""Keys of a JSON body: each stands once in its object."""

from __future__ import annotations

import json

import pytest

from pdbus.bus.errors import RequestError
from pdbus.nodes.http.body import check_keys
from pdbus.nodes.http.schema import parse_chat, parse_completion

CHAT = b'{"messages": [{"role": "user", "content": "a"}, {"role": "user", %s"content": "b"}]}'


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (b'{"prompt": "a", "prompt": "b"}', "prompt"),
        (b'{"prompt": "a", "prompt" : "a"}', "prompt"),
        (rb'{"prompt": "a", "pr\u006fmpt": "b"}', "prompt"),
        (b'{"prompt": "a", "stream": true, "stream_options": {"include_usage": true, "include_usage": false}}',
         "stream_options.include_usage"),
        (b'{"prompt": "a", "metadata": {"of": [1, {"x": 1, "x": 2}]}}', "metadata.of[1].x"),
        (rb'{"prompt": "a", "metadata": {"\u0061\"b": 1, "a\u0022b": 2}}', 'metadata.a"b'),
    ],
)  # fmt: skip
def test_a_key_that_stands_twice_is_refused_by_name(body: bytes, path: str) -> None:
    """Whoever checked the request before us may have taken the other value."""
    with pytest.raises(RequestError, match="is given twice") as caught:
        parse_completion(body)
    assert caught.value.param == path


def test_a_key_that_stands_twice_in_a_message_is_refused() -> None:
    parse_chat(CHAT % b"")
    with pytest.raises(RequestError) as caught:
        parse_chat(CHAT % b'"content": "c", ')
    assert (str(caught.value), caught.value.param) == ("messages[1].content: is given twice", "messages[1].content")


@pytest.mark.parametrize(
    "body",
    [
        {"a": {"x": 1}, "b": {"x": 1}},
        {"a": [{"x": 1}, {"x": 1}]},
        {"a": '"x": 1, "x": 2'},
        {"a": 'x\\": "a": {"a":'},
        {"a\\": 1, 'a"': 2, "a": 3},
        [{"a": 1}, []],
    ],
)
def test_the_same_key_in_other_objects_or_in_text_is_none(body: object) -> None:
    check_keys(json.dumps(body).encode())


def test_numbers_are_not_looked_at() -> None:
    """Python refuses to read whole numbers of more than 4300 digits."""
    check_keys(b'{"a": %s, "b": {"a": 1e999}}' % (b"1" * 5000))
