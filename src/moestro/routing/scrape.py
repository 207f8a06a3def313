"""What an engine's `/metrics` says of its load, whichever of the known servers it is. Reads lines, not families: a
server writes hundreds of lines and a handful are wanted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MAX_BYTES = 4 << 20  # of a text that is looked at; a server that writes more is not one of the known ones
_LARGEST = 2**53  # a count above it is not a count


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapedLoad:
    """What was found; None: it is not there, or is no possible value.

    Attributes:
        num_running, num_waiting: requests with, without KV blocks, of all ranks behind the address.
        kv_usage: fraction of KV blocks held, 0 .. 1; the mean of the ranks.
        num_tokens_computed: prompt and generated tokens since its start: a sign of progress.
        block_size: tokens of a KV block.
        num_kv_tokens: tokens that the KV cache holds, of all ranks.
    """

    num_running: int | None = None
    num_waiting: int | None = None
    kv_usage: float | None = None
    num_tokens_computed: float | None = None
    block_size: int | None = None
    num_kv_tokens: int | None = None


# Of each figure the names under which it goes, the first that is there counts: Moestro, vLLM (with the names it had
# before), SGLang. A server that has two (Moestro has vLLM's too) is not counted twice.
_RUNNING = ("moestro:num_requests_running", "vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING = ("moestro:num_requests_waiting", "vllm:num_requests_waiting", "sglang:num_queue_reqs")
_KV_USAGE = (
    *("moestro:kv_cache_usage_perc", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "sglang:token_usage",
)
_PROMPT = ("moestro:prompt_tokens_total", "vllm:prompt_tokens_total", "sglang:prompt_tokens_total")
_GENERATED = ("moestro:generation_tokens_total", "vllm:generation_tokens_total", "sglang:generation_tokens_total")
_CACHE_CONFIG = ("moestro:cache_config_info", "vllm:cache_config_info")
_KV_TOKENS = ("sglang:max_total_num_tokens",)

_BLOCK_SIZE = re.compile(rb'[{,]block_size="(\d{1,9})"')
_NUM_BLOCKS = re.compile(rb'[{,]num_gpu_blocks="(\d{1,12})"')


def scrape(text: bytes) -> ScrapedLoad:
    """Read Prometheus' text form. Never fails: what cannot be read is not there."""
    text = b"\n" + text[:MAX_BYTES]  # so that every line begins after one
    configs = [labels for labels, _ in _samples(text, _CACHE_CONFIG)]
    blocks = [_labelled(_NUM_BLOCKS, labels) for labels in configs]
    sizes = [_labelled(_BLOCK_SIZE, labels) for labels in configs]
    num_kv_tokens: float | None = None
    if configs and all(blocks) and all(sizes):
        num_kv_tokens = sum((block or 0) * (size or 0) for block, size in zip(blocks, sizes, strict=True))
    else:
        num_kv_tokens = _figure(text, _KV_TOKENS, sum)
    counters = [_figure(text, names, sum) for names in (_PROMPT, _GENERATED)]
    known = [count for count in counters if count is not None]
    kv_usage = _figure(text, _KV_USAGE, _mean)
    return ScrapedLoad(
        num_running=_count(_figure(text, _RUNNING, sum)),
        num_waiting=_count(_figure(text, _WAITING, sum)),
        kv_usage=None if kv_usage is None else min(kv_usage, 1.0),
        num_tokens_computed=sum(known) if known else None,
        block_size=sizes[0] if sizes else None,
        num_kv_tokens=_count(num_kv_tokens),
    )


def _figure(text: bytes, names: Sequence[str], combine: Callable[[list[float]], float]) -> float | None:
    values = [value for _, value in _samples(text, names)]
    if not values or not all(math.isfinite(value) and 0 <= value <= _LARGEST for value in values):
        return None
    return combine(values)


def _samples(text: bytes, names: Sequence[str]) -> list[tuple[bytes, float]]:
    """(labels, value) of each sample of the first of `names` that has any."""
    for name in names:
        found = _samples_of(text, name.encode())
        if found:
            return found
    return []


def _samples_of(text: bytes, name: bytes) -> list[tuple[bytes, float]]:
    found: list[tuple[bytes, float]] = []
    start = text.find(b"\n" + name)
    while start >= 0:
        begin = start + 1 + len(name)
        end = text.find(b"\n", begin)
        sample = _sample(text[begin : end if end >= 0 else len(text)])
        if sample is not None:
            found.append(sample)
        start = text.find(b"\n" + name, begin)
    return found


def _sample(line: bytes) -> tuple[bytes, float] | None:
    """What follows a sample's name: labels or none, a value, perhaps a time. None: the name was another, longer one."""
    if line[:1] == b"{":
        close = line.rfind(b"}")
        labels, rest = line[: close + 1], line[close + 1 :]
    elif line[:1] in (b" ", b"\t"):
        labels, rest = b"", line
    else:
        return None
    try:
        return labels, float(rest.split()[0])
    except (ValueError, IndexError):
        return labels, math.nan


def _labelled(pattern: re.Pattern[bytes], labels: bytes) -> int | None:
    found = pattern.search(labels)
    return int(found[1]) or None if found else None


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _count(value: float | None) -> int | None:
    return None if value is None else int(value)
