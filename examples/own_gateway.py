"""Moestro's router inside a gateway of your own: it does no I/O, so `choose` and `ended` fit into any server."""

import time
from itertools import count

from moestro.core.hashing import hash_key, hash_text
from moestro.core.request import Request, SamplingParams
from moestro.routing.registry import policy_from
from moestro.routing.router import Router

KEY, numbers = hash_key("my-model"), count()
router = Router(policy_from("moestro"))  # or any other policy: "lmetric", "cache_aware", "FILE.py:NAME"
engines = {router.add_engine(): url for url in ("http://gpu1:8000", "http://gpu2:8000")}
for row in engines:
    router.set_routable(row, routable=True)  # a gateway does so when its health check passes


def choose(prompt: str, now_ns: int | None = None) -> tuple[str, str]:
    """The name of a request, and the engine that it should go to."""
    text, now_ns = prompt.encode(), time.monotonic_ns() if now_ns is None else now_ns
    request = Request(
        request_id=str(next(numbers)),
        num_prompt_tokens=max(1, len(text) // 4),
        sampling=SamplingParams(),
        arrival_ns=now_ns,
        block_hashes=hash_text(KEY, text, block_bytes=64),  # 16 tokens of four bytes
    )
    return request.request_id, engines[router.submit(request, now_ns).engine]


def first_token(request_id: str) -> None:
    """The first token of a request has come: its prompt is computed, and its blocks are in the engine's cache."""
    router.first_token(request_id, time.monotonic_ns())


def ended(request_id: str, num_output_tokens: int) -> None:
    """A request has ended, for any reason."""
    router.ended(request_id, time.monotonic_ns(), num_output_tokens)
