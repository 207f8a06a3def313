"""Merges what workers report: metrics, statistics, engines and decisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from moestro.web.statistics import Durations, EngineStatistics, LiveStatistics

_SUMMED = ("num_in_flight", "num_decisions")
_UP = "up"


def merged_metrics(texts: Mapping[int, str]) -> bytes:
    """Return the metrics of all workers in Prometheus' text format, each sample with the label `worker`.

    Args:
        texts: metrics of each worker, by its number.
    """
    heads: dict[str, list[str]] = {}  # HELP and TYPE of each family, in order
    samples: dict[str, list[str]] = {}
    for worker, text in texts.items():
        family = ""
        for line in text.splitlines():
            if line.startswith("#"):
                family = line.split(" ", 3)[2]
                known = heads.setdefault(family, [])
                if line not in known and len(known) < 2:
                    known.append(line)
            elif line:
                samples.setdefault(family, []).append(_labelled(line, worker))
    lines = [line for family, head in heads.items() for line in (*head, *samples.get(family, ()))]
    return ("\n".join(lines) + "\n").encode()


def _labelled(sample: str, worker: int) -> str:
    """Return a sample with the label `worker` before its others."""
    name, brace, labels = sample.partition("{")
    if brace:
        return f'{name}{{worker="{worker}",{labels}'
    name, _, value = sample.partition(" ")
    return f'{name}{{worker="{worker}"}} {value}'


def merged_statistics(parts: Sequence[LiveStatistics], clients_port: int, operators_port: int) -> LiveStatistics:
    """Return the figures of all workers together. There is at least one.

    Args:
        clients_port, operators_port: ports that all workers share.
    """
    first = parts[0]
    by_name: dict[str, list[EngineStatistics]] = {}
    for part in parts:
        for engine in part.engines:
            by_name.setdefault(engine.name, []).append(engine)
    return msgspec.structs.replace(
        first,
        num_requests=sum(part.num_requests for part in parts),
        num_refused=sum(part.num_refused for part in parts),
        num_client_errors=sum(part.num_client_errors for part in parts),
        num_overload=sum(part.num_overload for part in parts),
        num_retried=sum(part.num_retried for part in parts),
        first_token_s=_merged_durations([part.first_token_s for part in parts]),
        clients_port=clients_port,
        operators_port=operators_port,
        engines=[_merged_engine(each) for each in by_name.values()],
    )


def _merged_durations(parts: Iterable[Durations | None]) -> Durations | None:
    found = [part for part in parts if part is not None]
    if not found:
        return None
    counts = [sum(each) for each in zip(*(part.counts for part in found), strict=True)]
    return Durations(found[0].bounds, counts)


def _merged_engine(parts: Sequence[EngineStatistics]) -> EngineStatistics:
    return msgspec.structs.replace(
        parts[0],
        condition=_worst([part.condition for part in parts]),
        num_in_flight=sum(part.num_in_flight for part in parts),
        num_requests=sum(part.num_requests for part in parts),
        num_prompt_tokens=sum(part.num_prompt_tokens for part in parts),
        num_cached_tokens=sum(part.num_cached_tokens for part in parts),
    )


def merged_engines(parts: Iterable[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the engines that workers show, each once: counts are summed, and a condition other than `up` is shown."""
    found: dict[str, dict[str, Any]] = {}
    for engines in parts:
        for engine in engines:
            known = found.get(engine["name"])
            if known is None:
                found[engine["name"]] = dict(engine)
                continue
            for name in _SUMMED:
                known[name] += engine[name]
            known["condition"] = _worst([known["condition"], engine["condition"]])
            known["cause"] = known["cause"] or engine["cause"]
    return list(found.values())


def merged_decisions(parts: Iterable[Sequence[Mapping[str, Any]]], limit: int) -> list[Mapping[str, Any]]:
    """Return the newest decisions of all workers, at most `limit`."""
    decisions = [decision for part in parts for decision in part]
    return sorted(decisions, key=lambda decision: float(decision["time"]), reverse=True)[:limit]


def _worst(conditions: Sequence[str]) -> str:
    return next((condition for condition in conditions if condition != _UP), _UP)
