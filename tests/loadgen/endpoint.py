"""An endpoint that answers as a test sets, in a thread of this process or, as a script, in a process of its own."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Awaitable, Callable

from aiohttp import web

MODEL, MAX_MODEL_LEN = "scripted", 2048
Behaviour = Callable[["Endpoint", web.Request, dict], Awaitable[web.StreamResponse]]


class Endpoint:
    """Serves on a free port of the loopback for the length of a `with`.

    `behaviours` are taken in turn by the row in a request's id; warm-up (run 0) always gets the first.
    """

    def __init__(self, *behaviours: Behaviour, key: str | None = None) -> None:
        self.behaviours = behaviours
        self.key = key
        self.bodies: list[dict] = []
        self.ids: list[str] = []
        self.num_in_flight = self.most_in_flight = 0
        self.url = ""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self.serve()))

    def __enter__(self) -> Endpoint:
        self._thread.start()
        assert self._ready.wait(300)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(300)

    async def serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=1 << 28)
        app.add_routes([web.get("/v1/models", self.models)])
        app.add_routes([web.post(f"/v1/{path}", self.answer) for path in ("completions", "chat/completions")])
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    async def models(self, http: web.Request) -> web.Response:
        if self.key is not None and http.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return web.json_response({"data": [{"id": MODEL, "max_model_len": MAX_MODEL_LEN}]})

    async def answer(self, http: web.Request) -> web.StreamResponse:
        body = json.loads(await http.read())
        self.bodies.append(body)
        self.ids.append(http.headers["x-request-id"])
        _, _, run, row = self.ids[-1].split("-")
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        try:
            turn = 0 if run == "0" else int(row) % len(self.behaviours)
            return await self.behaviours[turn](self, http, body)
        finally:
            self.num_in_flight -= 1


async def begin(http: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(http)
    return response


async def send(response: web.StreamResponse, chunk: object) -> None:
    await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


def text_chunk(text: str, reason: str | None = None) -> dict:
    return {"choices": [{"index": 0, "text": text, "finish_reason": reason}]}


def usage(body: dict) -> dict:
    counts = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
    return {"choices": [], "usage": counts | {"prompt_tokens_details": {"cached_tokens": 2}}}


async def tokens(response: web.StreamResponse, body: dict, last: str | None = "length") -> None:
    for i in range(body["max_tokens"]):
        await send(response, text_chunk("x", last if i + 1 == body["max_tokens"] else None))


def whole(gap_s: float = 0.0) -> Behaviour:
    """A whole answer; its first token `gap_s` after the request."""

    async def answer(_: Endpoint, http: web.Request, body: dict) -> web.StreamResponse:
        await asyncio.sleep(gap_s)
        response = await begin(http)
        await tokens(response, body)
        await send(response, usage(body))
        await response.write(b"data: [DONE]\n\n")
        return response

    return answer


def queued(work_s: float) -> Behaviour:
    """A server of one worker that takes `work_s` a request: beyond 1 / work_s requests a second, its queue grows."""
    lock = asyncio.Lock()
    answer = whole(work_s)

    async def wait(endpoint: Endpoint, http: web.Request, body: dict) -> web.StreamResponse:
        async with lock:
            return await answer(endpoint, http, body)

    return wait


async def without_usage(_: Endpoint, http: web.Request, body: dict) -> web.StreamResponse:
    response = await begin(http)
    await tokens(response, body)
    await response.write(b"data: [DONE]\n\n")
    return response


async def without_finish_reason(_: Endpoint, http: web.Request, body: dict) -> web.StreamResponse:
    response = await begin(http)
    await tokens(response, body, None)
    await send(response, usage(body))
    return response


async def error_event(_: Endpoint, http: web.Request, body: dict) -> web.StreamResponse:
    """As Moestro ends what it cannot finish: the cause, then the socket is gone in mid-body."""
    response = await begin(http)
    await send(response, text_chunk("x"))
    await response.write(b'event: error\ndata: {"error": {"message": "the engine died"}}\n\n')
    http.transport.close()
    return response


async def reset(_: Endpoint, http: web.Request, body: dict) -> web.StreamResponse:
    response = await begin(http)
    await send(response, text_chunk("x"))
    http.transport.abort()
    return response


async def busy(_: Endpoint, http: web.Request, body: dict) -> web.StreamResponse:
    return web.json_response({"error": {"message": "The queue is full."}}, status=503)


async def page(_: Endpoint, http: web.Request, body: dict) -> web.StreamResponse:
    return web.Response(text="<html>welcome</html>", content_type="text/html")


async def one_token_short(_: Endpoint, http: web.Request, body: dict) -> web.StreamResponse:
    return await whole()(_, http, body | {"max_tokens": body["max_tokens"] - 1})


if __name__ == "__main__":  # by hand, to find the load generator's own ceiling: loadgen_endpoint.py SECONDS
    endpoint = Endpoint(whole(float(sys.argv[1])))
    with endpoint:
        print(endpoint.url, flush=True)
        endpoint._thread.join()
