"""OpenAI's own Python client against a node and against the gateway: it need not know that it is not OpenAI."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import openai
import pytest

from .faults import OPTIONS, Site, expected, site_of
from .gateway_process import gateway_of

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(150)]

TEXT = "a prompt that is longer than a block"
SAID = bytes(expected(list(TEXT.encode()), 24))
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is a node?"}]


@pytest.fixture(scope="module")
def pair() -> Iterator[Site]:
    with site_of(1, 1, options=OPTIONS) as site:
        yield site


@asynccontextmanager
async def client_of(site: Site, what: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with gateway_of("--join", site.p.address) as gate:
        await gate.sees("decode-1")
        url = gate.process.http if what == "gateway" else site.d.http
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            yield client


@pytest.mark.parametrize("what", ["node", "gateway"])
def test_openais_client_gets_what_it_expects(pair: Site, what: str) -> None:
    async def talk() -> None:
        async with client_of(pair, what) as client:
            await check_models(client)
            await check_completions(client)
            await check_chat(client)
            await check_errors(client)

    pair.run(talk())


async def check_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in await client.models.list()] == ["coded"]
    assert (await client.models.retrieve("coded")).owned_by == "pdbus"


async def check_completions(client: openai.AsyncOpenAI) -> None:
    asked = {"model": "coded", "prompt": TEXT, "max_tokens": 24, "temperature": 0}
    whole = await client.completions.create(**asked, extra_body={"ignore_eos": True})  # type: ignore[call-overload]
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 24
    stream = await client.completions.create(  # type: ignore[call-overload]
        **asked, stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage.prompt_tokens == len(TEXT)


async def check_chat(client: openai.AsyncOpenAI) -> None:
    asked = {"model": "coded", "messages": CHAT, "max_completion_tokens": 12, "temperature": 0, "logprobs": True}
    whole = await client.chat.completions.create(**asked)  # type: ignore[call-overload]
    assert whole.choices[0].message.role == "assistant"
    stream = await client.chat.completions.create(**asked, stream=True)  # type: ignore[call-overload]
    deltas = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(deltas) == whole.choices[0].message.content


async def check_errors(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt-9' is not served here") as missing:
        await client.completions.create(model="gpt-9", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.completions.create(model="coded", prompt="x", temperature=99)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.APIStatusError) as late:
        await client.completions.create(model="coded", prompt="x", max_tokens=4000, extra_body={"deadline_ms": 1})
    assert late.value.status_code == 504


def test_what_it_says_is_what_the_engine_computes(pair: Site) -> None:
    async def talk() -> None:
        async with client_of(pair, "gateway") as client:
            answer = await client.completions.create(
                model="coded", prompt=TEXT, max_tokens=24, temperature=0, extra_body={"ignore_eos": True}
            )
            assert answer.choices[0].text == SAID.replace(b"\0", b"").decode(errors="replace")

    pair.run(talk())
