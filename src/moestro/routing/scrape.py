"""Reads the load of an engine from its `/metrics`, for all known servers; the router reads a report when it needs it.

One pass finds the few lines that are needed: a server writes hundreds, and most of an idle one stay as they were.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from moestro.core.load_figures import FIGURES, FigureKind, FigureSpec, FigureUnit, LoadFigures

MAX_BYTES = 4 << 20  # limit of parsed text; no known server writes more
_LARGEST = 2**53  # larger counts are invalid
MAX_RANKS = 1024  # data-parallel ranks behind one address; no known server has more


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTotals:
    """What all engines behind one address counted since their start; None means not shown.

    Attributes:
        num_generated_tokens: generated tokens.
        num_queried_tokens, num_hit_tokens: prompt tokens looked up, and found, in the prefix cache, in any tier.
        num_host_hit_tokens: those found in host memory alone.
        prompt_token_s: mean time to compute a prompt token, seconds.
        num_first_tokens: requests that have had a first token.
        first_token_s: sum of their times to it, seconds.
    """

    num_generated_tokens: int | None = None
    num_queried_tokens: int | None = None
    num_hit_tokens: int | None = None
    num_host_hit_tokens: int | None = None
    prompt_token_s: float | None = None
    num_first_tokens: int | None = None
    first_token_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapedLoad:
    """Figures of all engines behind one address, or of one of its ranks; None means missing, or no possible value.

    Series of the ranks that compute one engine (tensor, pipeline and expert parallel) are copies of one figure.

    Attributes:
        figures: gauges that a router keeps, summed over data-parallel engines; fractions and ratios are their mean.
        totals: counts for the page, which no policy reads.
        num_tokens_computed: prompt and generated tokens since the server's start, as a sign of progress.
        block_size: tokens per KV block.
        num_kv_tokens: capacity of the KV caches of all engines, tokens.
        num_host_tokens: capacity of the host memory below them, tokens.
    """

    figures: LoadFigures = field(default_factory=LoadFigures)
    totals: EngineTotals = field(default_factory=EngineTotals)
    num_tokens_computed: float | None = None
    block_size: int | None = None
    num_kv_tokens: int | None = None
    num_host_tokens: int | None = None


# Names by which servers expose a figure. Only the first name that a text contains counts, because a server may have
# two: Moestro has vLLM's names too. These are the names that do not follow from a `FigureSpec`.
_OTHER_NAMES = {
    "num_running": ("sglang:num_running_reqs",),
    "num_waiting": ("sglang:num_queue_reqs",),
    "kv_usage": ("vllm:gpu_cache_usage_perc", "sglang:token_usage"),  # the first is vLLM's older name
}


def _names_of(figure: str, spec: FigureSpec) -> tuple[str, ...]:
    vllm = (f"vllm:{spec.metric}",) if spec.has_vllm_name else ()
    return (f"moestro:{spec.metric}", *vllm, *_OTHER_NAMES.get(figure, ()))


_NAMES = {
    figure: _names_of(figure, spec)
    for figure, spec in FIGURES.items()
    if spec.is_routed and spec.metric is not None and spec.kind is FigureKind.GAUGE
}
SCRAPED_FIGURES = frozenset(_NAMES)  # figures that some known server shows
_PROMPT = ("moestro:prompt_tokens_total", "vllm:prompt_tokens_total", "sglang:prompt_tokens_total")
_GENERATED = ("moestro:generation_tokens_total", "vllm:generation_tokens_total", "sglang:generation_tokens_total")
_QUERIED = ("moestro:prefix_cache_queries_total", "vllm:prefix_cache_queries_total", "sglang:prompt_tokens_total")
_HITS = ("moestro:prefix_cache_hits_total", "vllm:prefix_cache_hits_total", "sglang:cached_tokens_total")
_HOST_HITS = ("moestro:external_prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total")
_FIRST_TOKENS, _FIRST_TOKEN_S = (
    tuple(f"{server}:time_to_first_token_seconds_{end}" for server in ("moestro", "vllm", "sglang"))
    for end in ("count", "sum")
)
_PREFILL_S = ("vllm:request_prefill_time_seconds_sum",)
_COMPUTED = ("vllm:request_prefill_kv_computed_tokens_sum",)
_CACHE_CONFIG = ("moestro:cache_config_info", "vllm:cache_config_info")
_KV_TOKENS = ("sglang:max_total_num_tokens",)

# Labels of ranks that compute one engine together (SGLang with --enable-metrics-for-all-schedulers). The data-parallel
# engines of an address differ in others: `engine` (vLLM, Moestro), `dp_rank` (SGLang).
_RANK_LABELS = frozenset(
    {b"tp_rank", b"pp_rank", b"ep_rank", b"moe_ep_rank", b"moe_dp_rank", b"cp_rank", b"attn_tp_rank", b"attn_cp_rank"}
)
_PRIORITY = b"priority"  # SGLang shows the requests of each priority beside their sum, whose priority is empty

# Bounds of an untrusted text, whose labels are parsed in time that grows with their length squared.
_MAX_LABEL_BYTES = 1024
_MAX_SERIES = 4096  # of one figure: ranks times priorities
_LABEL = re.compile(rb'[{,]\s*([A-Za-z_]\w*+)="((?:[^"\\]|\\.)*+)"')
_BLOCK_SIZE = re.compile(rb'[{,]block_size="(\d{1,9})"')
_NUM_HOST_BLOCKS = re.compile(rb'[{,]num_cpu_blocks="(\d{1,12})"')
_NUM_BLOCKS = re.compile(rb'[{,]num_gpu_blocks="(\d{1,12})"')
_DP_RANK = re.compile(rb'[{,](?:engine|dp_rank)="(\d{1,4})"')

_Sample = tuple[bytes, float]  # (labels, value)


def _pattern(names: Iterable[str]) -> re.Pattern[bytes]:
    """Return the pattern of (name, rest) of lines with one of `names`. Servers come first, so others fail early."""
    of_server: dict[str, set[str]] = {}
    for name in names:
        server, _, rest = name.partition(":")
        of_server.setdefault(server, set()).add(rest)
    servers = "|".join(f"{server}:(?:{'|'.join(sorted(rests))})" for server, rests in sorted(of_server.items()))
    return re.compile(rf"\n({servers})([{{ \t][^\n]*)".encode())


_NEEDED_LINE = _pattern(
    name
    for names in (
        *_NAMES.values(), _PROMPT, _GENERATED, _QUERIED, _HITS, _HOST_HITS, _FIRST_TOKENS, _FIRST_TOKEN_S, _PREFILL_S,
        _COMPUTED, _CACHE_CONFIG, _KV_TOKENS,
    )
    for name in names
)  # fmt: skip


def scrape(text: bytes) -> ScrapedLoad:
    """Read figures from Prometheus' text format. Never fails: an unreadable figure is None."""
    return MetricsReader(text).load


def scrape_ranks(text: bytes) -> dict[int, ScrapedLoad]:
    """Read the figures of each data-parallel rank behind one address. Never fails: an unreadable figure is None.

    Returns:
        The load of each rank by its number, in ascending order. Empty if the text names no rank, or is Moestro's own:
        its engines have their own router, and take no rank from a client.
    """
    return MetricsReader(text).by_rank


class MetricsReader:
    """Reads the texts of one server, one after the other. A text with the same figures as the last is not parsed again.

    Args:
        text: the first text.
    """

    def __init__(self, text: bytes = b"") -> None:
        self._lines: list[tuple[bytes, bytes]] = []
        self._span = b""  # the last text from its first needed line to the end of its last
        self._exposed = _Exposed(())
        self._load: ScrapedLoad | None = None
        self._by_rank: dict[int, ScrapedLoad] | None = None
        self.take(text)

    def take(self, text: bytes) -> None:
        """Replace the text."""
        text = text[:MAX_BYTES]
        if text[:1] != b"#":  # Each needed line follows a newline; the first line of most servers is a comment.
            text = b"\n" + text
        if self._has_same_span(text):
            return
        found = list(_NEEDED_LINE.finditer(text))
        self._span = text[found[0].start() : found[-1].end()] if found else b""
        lines = [(each[1], each[2]) for each in found]
        if lines != self._lines:
            self._lines, self._exposed, self._load, self._by_rank = lines, _Exposed(lines), None, None

    def _has_same_span(self, text: bytes) -> bool:
        """Return whether all needed lines are those of the last text: of an idle server only other lines change.

        To compare the bytes takes a tenth of the time of a search for the lines.
        """
        span = self._span
        begin = text.find(span[: span.find(b"\n", 1)]) if span else -1
        end = begin + len(span)
        if begin < 0 or not text.startswith(span, begin) or text[end : end + 1] not in (b"\n", b""):
            return False
        return not _NEEDED_LINE.search(text, 0, begin) and not _NEEDED_LINE.search(text, end)

    @property
    def load(self) -> ScrapedLoad:
        """Figures of all engines behind the address."""
        if self._load is None:
            self._load = _load(self._exposed, None)
        return self._load

    @property
    def by_rank(self) -> dict[int, ScrapedLoad]:
        """Figures of each data-parallel rank, as `scrape_ranks` returns them."""
        if self._by_rank is None:
            exposed = self._exposed
            # A server with several front ends shows gauges only after its first request, but counters from its start.
            shown = [each for names in (_NAMES["num_running"], _GENERATED) for each in exposed.of(names)]
            is_own = bool(exposed.of(_NAMES["num_running"][:1]))
            found = set() if is_own else {rank for labels, _ in shown if (rank := _rank_of(labels)) is not None}
            self._by_rank = {rank: _load(exposed, rank) for rank in sorted(found)[:MAX_RANKS]}
        return self._by_rank


class _Exposed:
    """The samples of a text, by name.

    Args:
        lines: (name, rest of the line) of the needed lines.
    """

    def __init__(self, lines: Iterable[tuple[bytes, bytes]]) -> None:
        self._found: dict[str, list[_Sample]] = {}
        self._by_rank: dict[str, dict[int | None, list[_Sample]]] = {}
        for name, rest in lines:
            self._found.setdefault(name.decode(), []).append(_sample(rest))

    def of(self, names: Sequence[str], rank: int | None = None) -> list[_Sample]:
        """Return (labels, value) for each sample of the first of `names` that has samples.

        Args:
            rank: data-parallel rank whose samples alone count; None means all.
        """
        for name in names:
            if found := self._found.get(name):
                return found if rank is None else self._of_ranks(name).get(rank, [])
        return []

    def _of_ranks(self, name: str) -> dict[int | None, list[_Sample]]:
        by_rank = self._by_rank.get(name)
        if by_rank is None:
            by_rank = self._by_rank[name] = {}
            for sample in self._found[name]:
                by_rank.setdefault(_rank_of(sample[0]), []).append(sample)
        return by_rank


def _load(exposed: _Exposed, rank: int | None) -> ScrapedLoad:
    def figure(names: Sequence[str], combine: Callable[[list[float]], float] = sum) -> float | None:
        return _figure(exposed.of(names, rank), combine)

    configs = [labels for labels, _ in exposed.of(_CACHE_CONFIG, rank)]
    blocks = [_labelled(_NUM_BLOCKS, labels) for labels in configs]
    sizes = [_labelled(_BLOCK_SIZE, labels) for labels in configs]
    host_blocks = [_labelled(_NUM_HOST_BLOCKS, labels) for labels in configs]
    num_host_tokens = sum((block or 0) * (size or 0) for block, size in zip(host_blocks, sizes, strict=True))
    num_kv_tokens: float | None = None
    if configs and all(blocks) and all(sizes):
        num_kv_tokens = sum((block or 0) * (size or 0) for block, size in zip(blocks, sizes, strict=True))
    else:
        num_kv_tokens = figure(_KV_TOKENS)
    num_generated = figure(_GENERATED)
    known = [count for count in (figure(_PROMPT), num_generated) if count is not None]
    num_hits, num_host_hits = figure(_HITS), figure(_HOST_HITS)
    seconds, num_computed = figure(_PREFILL_S), figure(_COMPUTED)
    return ScrapedLoad(
        figures=LoadFigures(**{name: _load_figure(exposed.of(names, rank), name) for name, names in _NAMES.items()}),
        totals=EngineTotals(
            num_generated_tokens=_count(num_generated),
            num_queried_tokens=_count(figure(_QUERIED)),
            num_hit_tokens=_count(None if num_hits is None else num_hits + (num_host_hits or 0)),
            num_host_hit_tokens=_count(num_host_hits),
            prompt_token_s=seconds / num_computed if seconds and num_computed else None,
            num_first_tokens=_count(figure(_FIRST_TOKENS)),
            first_token_s=figure(_FIRST_TOKEN_S),
        ),
        num_tokens_computed=sum(known) if known else None,
        block_size=sizes[0] if sizes else None,
        num_kv_tokens=_count(num_kv_tokens),
        num_host_tokens=num_host_tokens or None,
    )


def _load_figure(found: Sequence[_Sample], figure: str) -> Any:
    unit = FIGURES[figure].unit
    if unit is FigureUnit.RATIO:
        return _figure(found, _mean)
    if unit is FigureUnit.FRACTION:
        mean = _figure(found, _mean)
        return None if mean is None else min(mean, 1.0)
    return _count(_figure(found, sum))


def _figure(found: Sequence[_Sample], combine: Callable[[list[float]], float]) -> float | None:
    if not 0 < len(found) <= _MAX_SERIES or any(len(labels) > _MAX_LABEL_BYTES for labels, _ in found):
        return None
    if not all(math.isfinite(value) and 0 <= value <= _LARGEST for _, value in found):
        return None
    samples = [(dict(_LABEL.findall(labels)), value) for labels, value in found]
    has_sums = any(labels.get(_PRIORITY) == b"" for labels, _ in samples)
    engines: dict[frozenset[tuple[bytes, bytes]], float] = {}
    for labels, value in samples:
        if has_sums and labels.get(_PRIORITY):
            continue
        engine = frozenset(label for label in labels.items() if label[0] not in _RANK_LABELS)
        engines[engine] = max(value, engines.get(engine, 0.0))  # ranks are read at slightly different moments
    return combine(list(engines.values()))


def _rank_of(labels: bytes) -> int | None:
    """Return the data-parallel rank of a series; None means that it belongs to none, or to an unlikely one."""
    found = _DP_RANK.search(labels) if len(labels) <= _MAX_LABEL_BYTES else None
    return int(found[1]) if found else None


def _sample(line: bytes) -> _Sample:
    """Parse the rest of a sample's line: optional labels, a value, an optional time."""
    close = line.rfind(b"}") if line[:1] == b"{" else -1
    labels, rest = line[: close + 1], line[close + 1 :]
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


class FiguresReport(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Figures of an engine, and their time on the router's clock."""

    engine: int
    figures: LoadFigures
    as_of_ns: int

    def replaces(self, earlier: FiguresReport) -> bool:
        """Return whether an earlier report of the same engine is superfluous: this one is no older, and lacks nothing.

        An engine reports every step, so all figures are compared at once; each attribute would take as long as that.
        """
        if self.as_of_ns < earlier.as_of_ns:
            return False
        pairs = zip(msgspec.structs.astuple(self.figures), msgspec.structs.astuple(earlier.figures), strict=True)
        for now, before in pairs:  # noqa: SIM110  # a generator takes twice as long
            if now is None and before is not None:
                return False
        return True
