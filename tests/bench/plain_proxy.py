"""`plain_proxy PORT PREFILL_URL DECODE_URL`: what vLLM's NixlConnector needs in front of a pair, and no more.

Each completion goes to P first, for one token; where its KV is, as P's answer says, goes to D with the request. Run by
vLLM's own Python, which has aiohttp.
"""

from __future__ import annotations

import sys
import uuid
from typing import Any

from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

BODY_BYTES_MAX = 64 << 20
ASKED: dict[str, Any] = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
OF_STREAMS = ("stream", "stream_options")


def app(prefill: str, decode: str) -> web.Application:
    session: list[ClientSession] = []

    async def start(_: web.Application) -> None:
        session.append(ClientSession(timeout=ClientTimeout(total=None), connector=TCPConnector(limit=0)))

    async def stop(_: web.Application) -> None:
        await session[0].close()

    async def completion(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        headers = {"X-Request-Id": uuid.uuid4().hex}
        first = {key: value for key, value in body.items() if key not in OF_STREAMS}
        first |= {"max_tokens": 1, "min_tokens": 1, "kv_transfer_params": ASKED}
        async with session[0].post(prefill + request.path, json=first, headers=headers) as answer:
            if answer.status != 200:
                return web.Response(status=answer.status, body=await answer.read())
            place = (await answer.json()).get("kv_transfer_params")
        second = {**body, "kv_transfer_params": place}
        async with session[0].post(decode + request.path, json=second, headers=headers) as answer:
            out = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]})
            await out.prepare(request)
            async for some in answer.content.iter_any():
                await out.write(some)
            await out.write_eof()
            return out

    made = web.Application(client_max_size=BODY_BYTES_MAX)
    made.router.add_post("/v1/completions", completion)
    made.on_startup.append(start)
    made.on_cleanup.append(stop)
    return made


if __name__ == "__main__":
    port, prefill, decode = sys.argv[1:]
    web.run_app(app(prefill, decode), host="127.0.0.1", port=int(port), print=None)
