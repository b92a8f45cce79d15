"""A completion's prompt at the head of its answer."""

from __future__ import annotations

import json
from typing import Any

from pdbus.bus.messages import Finished, Token, TokenLogprob
from pdbus.bus.wire import pack_u32
from pdbus.nodes.http.answer import Completion
from pdbus.nodes.http.schema import Asked, parse_completion

END = Finished(client_id="", request=b"r", reason="length")
FIRST = Token(
    client_id="", request=b"r", index=0, tokens=pack_u32([9]), text="!", logprobs=(TokenLogprob(logprob=-0.5),),
    pieces=((b"!",),),
    prompt=pack_u32([1, 5, 6]), prompt_logprobs=(TokenLogprob(logprob=-1.0, top=((7, -0.1),)), TokenLogprob(-2.0)),
    prompt_pieces=((b"<s>",), ("ä".encode(), b"x"), (b"b",)),
)  # fmt: skip


def asked(**fields: Any) -> Asked:
    return parse_completion(json.dumps({"echo": True, **fields}).encode())


def whole(**fields: Any) -> dict[str, Any]:
    return Completion(asked(**fields), "m", 0).choice([FIRST], END)


def test_scores_of_the_prompt_come_before_those_of_the_answer() -> None:
    """A token that stands before the text, as many tokenizers put one there, begins where the text begins."""
    choice = whole(prompt="äb", logprobs=1)
    assert choice["text"] == "äb!"
    assert choice["logprobs"] == {
        "tokens": ["<s>", "ä", "b", "!"],
        "token_logprobs": [None, -1.0, -2.0, -0.5],
        "top_logprobs": [None, {"x": -0.1}, {}, {}],
        "text_offset": [0, 0, 1, 2],
    }


def test_nothing_but_the_prompt() -> None:
    """The node has sampled a token all the same: nobody is told."""
    wanted = asked(prompt="äb", logprobs=0, max_tokens=0)
    assert (wanted.sampling.max_tokens, wanted.sampling.prompt_logprobs, wanted.answers) == (1, 0, False)
    choice = whole(prompt="äb", logprobs=0, max_tokens=0, return_token_ids=True)
    assert (choice["text"], choice["token_ids"], choice["logprobs"]["tokens"]) == ("äb", [], ["<s>", "ä", "b"])


def test_the_text_of_ids_is_what_the_node_says() -> None:
    wanted = asked(prompt=[1, 5, 6])
    assert wanted.sampling.prompt_logprobs == 0 and wanted.sampling.logprobs is None
    choice = whole(prompt=[1, 5, 6])
    assert (choice["text"], choice["logprobs"]) == ("<s>äb!", None)


def test_text_alone_needs_nothing_of_the_node() -> None:
    assert asked(prompt="ab").sampling.prompt_logprobs is None


def test_a_stream_echoes_once_to_each_choice() -> None:
    wanted = asked(prompt=["ab", "cd"], stream=True, n=2)
    for index, prompt in enumerate(["ab", "ab", "cd", "cd"]):
        answer = Completion(wanted, "m", 0, index)
        chunks = [answer.chunk(b"r", FIRST), answer.chunk(b"r", FIRST), answer.closing(b"r", END)]
        assert [chunk["choices"][0]["text"] for chunk in chunks] == [prompt + "!", "!", ""]
