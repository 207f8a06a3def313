"""The two ends of router benches, a cheap responder and a load generator, and a minimal Python proxy as lower bound.

    python bench/routing/router_parts.py respond 9101 9102
    python bench/routing/router_parts.py pass 9100 http://127.0.0.1:9101
    python bench/routing/router_parts.py load http://127.0.0.1:9101 \\
        '{"size": 2400, "stream": false, "users": 8, "seconds": 1}'

All are raw asyncio protocols; `bench/routing/router_overhead.py` runs them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import statistics
import sys
import time
from urllib.parse import urlsplit

import httptools
import uvloop

TOKENS, TOKEN_S = 8, 0.005
PROMPTS = 8  # shared prefixes; the suffix differs between requests
WARM_UP_S = 0.3
MODEL = "bench"
_STREAM = re.compile(rb'"stream"\s*:\s*true')  # some routers rewrite the body
_WORDS = "the quick brown fox jumps over the lazy dog while seven wizards quietly mix a potion of "
_WHOLE = json.dumps(
    {
        "id": "x",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello there"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 600, "completion_tokens": 3, "total_tokens": 603},
    }
).encode()
_CHUNK = json.dumps(
    {
        "id": "x",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "delta": {"content": " token"}}],
    }
).encode()
_CARDS = json.dumps(
    {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 1, "owned_by": "b"}]}
).encode()


def metrics_of_an_engine():
    """Return `/metrics` of an idle engine, with the names of vLLM 0.26 and as many bytes."""
    labels = 'engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"'
    lines = []

    def family(name, kind, samples):
        lines.extend((f"# HELP {name} What an operator reads about {name}.", f"# TYPE {name} {kind}", *samples))

    for name in ("process_virtual_memory_bytes", "process_resident_memory_bytes", "process_start_time_seconds"):
        family(name, "gauge", [f"{name} 1.7e+09"])
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        family(f"vllm:{name}", "gauge", [f"vllm:{name}{{{labels}}} 0.0"])
    caches = [f"{kind}_{count}" for kind in ("prefix_cache", "external_prefix_cache") for count in ("queries", "hits")]
    for name in (*caches, "num_preemptions", "prompt_tokens", "generation_tokens"):
        family(f"vllm:{name}_total", "counter", [f"vllm:{name}_total{{{labels}}} 12345.0"])
        family(f"vllm:{name}_created", "gauge", [f"vllm:{name}_created{{{labels}}} 1.7e+09"])
    config = 'block_size="16",cache_dtype="auto",engine="0",num_cpu_blocks="0",num_gpu_blocks="27000"'
    family("vllm:cache_config_info", "gauge", [f"vllm:cache_config_info{{{config}}} 1.0"])
    times = ("request_queue_time", "request_inference_time", "request_prefill_time", "request_decode_time")
    counts = ("request_prompt_tokens", "request_generation_tokens", "iteration_tokens_total", "request_params_n")
    latencies = ("time_to_first_token", "inter_token_latency", "time_per_output_token", "e2e_request_latency")
    for name in (*(f"{each}_seconds" for each in (*times, *latencies)), *counts, "request_prefill_kv_computed_tokens"):
        buckets = [f'vllm:{name}_bucket{{{labels},le="{1.5 * i}"}} {10.0 * i}' for i in range(24)]
        ends = [f"vllm:{name}_count{{{labels}}} 240.0", f"vllm:{name}_sum{{{labels}}} 1234.5"]
        family(f"vllm:{name}", "histogram", [*buckets, *ends])
    return "\n".join(lines).encode()


class Responder(asyncio.Protocol):
    """A server that answers completions with constants, and the paths that routers query on an engine."""

    metrics, serial = metrics_of_an_engine(), itertools.count()

    def connection_made(self, transport):
        self.transport = transport
        self.parser = httptools.HttpRequestParser(self)

    def data_received(self, data):
        self.parser.feed_data(data)

    def on_message_begin(self):
        self.url, self.body = b"", []

    def on_url(self, part):
        self.url += part

    def on_body(self, part):
        self.body.append(part)

    def on_message_complete(self):
        if self.url in (b"/v1/chat/completions", b"/v1/completions"):
            if _STREAM.search(b"".join(self.body)):
                self.stream()
            else:
                self.reply(_WHOLE)
        elif self.url == b"/v1/models":
            self.reply(_CARDS)
        elif self.url == b"/health":
            self.reply(b"")
        elif self.url == b"/metrics":
            # As behind vLLM's API server, something that no router reads changes with every read.
            self.reply(b'%b\nhttp_requests_total{handler="/metrics"} %d.0\n' % (self.metrics, next(self.serial)))
        else:
            self.reply(b"{}", b"404 Not Found")

    def reply(self, body, status=b"200 OK"):
        head = b"HTTP/1.1 %b\r\ncontent-length: %d\r\ncontent-type: application/json\r\nserver: uvicorn\r\n\r\n"
        self.transport.write(head % (status, len(body)) + body)

    def stream(self):
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: text/event-stream; charset=utf-8\r\n\r\n"
        )
        loop = asyncio.get_running_loop()
        for i in range(TOKENS):
            loop.call_later(TOKEN_S * (i + 1), self.token, i == TOKENS - 1)

    def token(self, is_last):
        data = b"data: " + _CHUNK + b"\n\n" + (b"data: [DONE]\n\n" if is_last else b"")
        self.transport.write(b"%x\r\n%b\r\n%b" % (len(data), data, b"0\r\n\r\n" if is_last else b""))


class Passing(asyncio.Protocol):
    """Forwards each client connection byte for byte over a separate connection: the lower bound of every router."""

    def connection_made(self, transport):
        self.transport, self.engine, self.early = transport, None, []

    async def connect(self, host, port):
        loop = asyncio.get_running_loop()
        _, self.engine = await loop.create_connection(lambda: PassingBack(self), host, port)
        for data in self.early:
            self.engine.transport.write(data)

    def data_received(self, data):
        if self.engine is None:
            self.early.append(data)
        else:
            self.engine.transport.write(data)

    def connection_lost(self, exc):
        if self.engine is not None:
            self.engine.transport.close()


class PassingBack(asyncio.Protocol):
    """The connection to the responder, forwarded to the client."""

    def __init__(self, client):
        self.client = client

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        if not self.client.transport.is_closing():
            self.client.transport.write(data)


class User(asyncio.Protocol):
    """One connection of a closed load."""

    def __init__(self, load):
        self.load = load

    def connection_made(self, transport):
        self.transport = transport
        self.parser = httptools.HttpResponseParser(self)
        self.ask()

    def ask(self):
        self.first_s = None
        request = self.load.request()
        self.sent_s = time.perf_counter()
        self.transport.write(request)

    def data_received(self, data):
        self.parser.feed_data(data)

    def on_body(self, part):
        if self.first_s is None:
            self.first_s = time.perf_counter()

    def on_message_complete(self):
        if self.parser.get_status_code() != 200:
            raise SystemExit(f"answered {self.parser.get_status_code()}")
        self.load.ended(self.sent_s, self.first_s, time.perf_counter())
        self.ask()


class Load:
    """Makes the requests of a load, and records their times."""

    def __init__(self, url, size, stream):
        self.address = urlsplit(url)
        self.serial = itertools.count()
        self.times = []
        text = _WORDS * (size // len(_WORDS) + 1)
        self.systems = [f"System {i}. {text}"[: size * 3 // 4] for i in range(PROMPTS)]
        self.user, self.stream = text[: size // 5], stream

    def request(self):
        serial = next(self.serial)
        messages = [
            {"role": "system", "content": self.systems[serial % PROMPTS]},
            {"role": "user", "content": f"Question {serial}: {self.user}"},
        ]
        fields = {"model": MODEL, "messages": messages, "max_tokens": TOKENS, "temperature": 0.5, "stream": self.stream}
        body = json.dumps(fields).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self.address.netloc}\r\nContent-Type: application/json\r\n"
            "Accept: */*\r\nAccept-Encoding: identity\r\nUser-Agent: bench\r\nAuthorization: Bearer none\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def ended(self, sent_s, first_s, done_s):
        self.times.append((first_s - sent_s, done_s - sent_s))


async def respond(ports):
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Responder, "127.0.0.1", port) for port in ports]
    print("ready", flush=True)
    await asyncio.gather(*(server.serve_forever() for server in servers))


async def pass_on(port, url):
    loop, target, tasks = asyncio.get_running_loop(), urlsplit(url), set()

    def accept():
        client = Passing()
        tasks.add(loop.create_task(client.connect(target.hostname, target.port)))
        return client

    await (await loop.create_server(accept, "127.0.0.1", port)).serve_forever()


async def load(url, size, stream, users, seconds):
    """Print `begin` when warm, wait for the end of the measurement, and print its figures."""
    run = Load(url, size, stream)
    loop = asyncio.get_running_loop()
    for _ in range(users):
        await loop.create_connection(lambda: User(run), run.address.hostname, run.address.port)
    await asyncio.sleep(WARM_UP_S)
    run.times.clear()
    print("begin", flush=True)
    began_s = time.perf_counter()
    await asyncio.sleep(seconds)
    lasted_s, times = time.perf_counter() - began_s, list(run.times)
    print("end", flush=True)
    firsts = [first for first, _ in times]
    result = {
        "num_requests": len(times),
        "requests_per_s": len(times) / lasted_s,
        "first_byte_p50_ms": statistics.median(firsts) * 1e3,
        "first_byte_p99_ms": sorted(firsts)[int(len(firsts) * 0.99)] * 1e3,
        "whole_p50_ms": statistics.median(whole for _, whole in times) * 1e3,
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    if sys.argv[1:] in ([], ["--help"]):
        print(__doc__)
    elif sys.argv[1] == "respond":
        uvloop.run(respond([int(port) for port in sys.argv[2:]]))
    elif sys.argv[1] == "pass":
        uvloop.run(pass_on(int(sys.argv[2]), sys.argv[3]))
    else:
        uvloop.run(load(sys.argv[2], **json.loads(sys.argv[3])))
