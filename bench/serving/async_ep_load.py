"""The requests of `async_ep.py`, and the client process that sends them.

    python bench/serving/async_ep_load.py '{"num_requests": 512, …}' http://127.0.0.1:8000

The client is a process of its own, so that nothing else in it delays the time stamps of tokens. It prints one line for
the warm-up and, when it reads a line from its standard input, sends the load and prints a second one.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

import msgspec
import numpy as np
import uvloop

from moestro.loadgen.client import BenchClient, Endpoint
from moestro.loadgen.load import BenchLoad, run_load
from moestro.loadgen.settings import EndpointSettings
from moestro.workload.run_records import make_report, spread_of

_VOCAB = (3, 4096)  # token ids of prompts; the first ones are special


@dataclass(frozen=True, kw_only=True)
class Load:
    """A closed load: a request arrives when one of `num_users` turns is free.

    Attributes:
        num_requests: requests after the warm-up.
        num_users: requests in flight at once.
        num_shared, num_own: tokens at the beginning of all prompts, and tokens after it.
        outputs: least and most tokens of an answer, drawn uniformly.
        num_warm: requests of the warm-up, all at once, so that each engine has the shared beginning in its cache.
        seed: seed of lengths and prompts.
    """

    num_requests: int
    num_users: int
    num_shared: int
    num_own: int
    outputs: tuple[int, int]
    num_warm: int
    seed: int

    def lengths(self) -> np.ndarray:
        """int64[num_requests], tokens of each answer."""
        return np.random.default_rng([self.seed, 0]).integers(self.outputs[0], self.outputs[1] + 1, self.num_requests)


def _prompts(load: Load, count: int, stream: int) -> list[list[int]]:
    shared = np.random.default_rng([load.seed, 1]).integers(*_VOCAB, load.num_shared).tolist()
    own = np.random.default_rng([load.seed, stream]).integers(*_VOCAB, (count, load.num_own)).tolist()
    return [shared + rest for rest in own]


def _bodies(prompts: list[list[int]], lengths: list[int], model: str) -> list[bytes]:
    options = {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    return [
        msgspec.json.encode({"model": model, "prompt": prompt, "max_tokens": length, **options})
        for prompt, length in zip(prompts, lengths, strict=True)
    ]


async def _find(settings: EndpointSettings) -> Endpoint:
    async with BenchClient(settings) as client:
        return await client.find_endpoint()


def _run(settings: EndpointSettings, bodies: list[bytes], lengths: np.ndarray, limit: int | None) -> dict[str, object]:
    endpoint = uvloop.run(_find(settings))
    load = BenchLoad(bodies=bodies, num_requested_tokens=lengths, offsets_ns=None, limit=limit, name="async-ep")
    records = run_load(settings, endpoint, load)
    report = make_report(records)
    assert report.num_ok == report.num_requests, report.failures
    assert report.num_wrong_length == 0
    answered = records.answered
    return {
        "duration_s": report.duration_s,
        "num_tokens": report.num_output_tokens,
        "cached_share": report.cached_share,
        "ttft_ms": msgspec.to_builtins(spread_of(answered.ttft_ns)),
        "itl_ms": msgspec.to_builtins(spread_of(records.itl_ns)),
        "sent_ms": _sent_ms(records.timelines.arrival_ns[: limit or len(bodies)]),
        "client_late_p99_ms": max(report.send_lateness.p99, report.client_stalls.p99),
    }


def _sent_ms(sent_ns: np.ndarray) -> list[float]:
    """Return when each of the first requests, which wait for no other one, was sent, since the first of them."""
    return ((sent_ns - sent_ns.min()) / 1e6).tolist()


def main() -> None:
    load, settings = Load(**json.loads(sys.argv[1])), EndpointSettings(base_url=sys.argv[2])
    model = uvloop.run(_find(settings)).model
    warm = np.full(load.num_warm, 2)
    print(json.dumps(_run(settings, _bodies(_prompts(load, load.num_warm, 2), warm.tolist(), model), warm, None)))
    lengths = load.lengths()
    bodies = _bodies(_prompts(load, load.num_requests, 3), lengths.tolist(), model)
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(_run(settings, bodies, lengths, load.num_users)), flush=True)


def arguments(load: Load, url: str) -> list[str]:
    """Return the command that sends `load` to `url`."""
    return [sys.executable, __file__, json.dumps(asdict(load)), url]


if __name__ == "__main__":
    main()
