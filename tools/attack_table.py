"""The table of attacks in docs/attacks.md, made from the stored result of `before_and_after.py`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parents[1] / "bench" / "results" / "robustness" / "strangers.json"
Figures = dict[str, Any]


def attacks_table() -> str:
    """Attacks with what the stranger does, and what became of others before and after the mends."""
    stored = json.loads(RESULT.read_text())
    rows = ["| attack | what the stranger does | before | now |", "|---|---|---|---|"]
    for name, (what, figure) in _ATTACKS.items():
        before, now = (_figure_of(stored[name][when], figure) for when in ("before", "after"))
        rows.append(f"| `{name}.py` | {what} | {before} | {now} |")
    return "\n".join(rows)


def _figure_of(found: Figures, figure: Callable[[Figures], str]) -> str:
    return found["failure"] if "failure" in found else figure(found)


def _values(found: object, name: str) -> Iterator[float]:
    """All numbers called `name` at any depth."""
    if isinstance(found, list):
        for value in found:
            yield from _values(value, name)
    if isinstance(found, dict):
        for key, value in found.items():
            if key == name and isinstance(value, int | float):
                yield value
            else:
                yield from _values(value, name)


def _poison(found: Figures) -> str:
    return f"{found['num_honest_failed']:,} of {found['num_honest']:,} honest requests fail"


def _gzip_bomb(found: Figures) -> str:
    return f"`/health` waits up to {1e3 * max(_values(found, 'max_s')):,.0f} ms"


def _grammars(found: Figures) -> str:
    kinds = [kind for kind in found.values() if isinstance(kind, dict) and "rounds" in kind]
    alone, harmless = (
        max(statistics.median(kind[f"plain_over_{beside}"]) for kind in kinds) for beside in ("alone", "harmless")
    )
    return (
        f"p50 of honest requests at most {alone:.2f} of that alone, {harmless:.2f} of that beside harmless requests of"
        f" the same size; at most {max(_values(kinds, 'mb')) / 1e3:.1f} GB"
    )


def _heavy_requests(found: Figures) -> str:
    kinds = {name: kind for name, kind in found.items() if isinstance(kind, dict) and "beside" in kind}
    ratios = {name: kind["ratio"] for name, kind in kinds.items() if kind.get("ratio")}
    longest = max(ratios, key=lambda name: ratios[name])
    median = statistics.median(ratios.values())
    unanswered = [f"`{name}`" for name in kinds if name not in ratios]
    none = f"; none answered beside {', '.join(unanswered)}" if unanswered else ""
    return f"p50 of honest requests {median:.2f} times (median of the kinds), {ratios[longest]:.2f} (`{longest}`){none}"


def _kv_events(found: Figures) -> str:
    beside = max(kind["beside"]["max_s"] for kind in found.values() if isinstance(kind, dict) and "beside" in kind)
    return f"a request waits up to {1e3 * beside:,.0f} ms; up to {max(_values(found, 'most_more_mb')):,.0f} MB more"


def _kv_publisher(found: Figures) -> str:
    more = max(max(_values(found, name)) for name in ("most_more_mb", "more_mb_afterwards"))
    return f"up to {more:,.1f} MB more; up to {max(_values(found, 'most_more_files')):,.0f} files"


def _any_json(found: Figures) -> str:
    return f"{found['num_5xx']:,} of {found['num_requests']:,} answers are 5xx"


def _raw_http(found: Figures) -> str:
    keys = sum(found["secrets_in_log"].values())
    return f"{sum(found['log_lines'].values()):,} log lines; {keys:,} with a key"


def _hung_engine(found: Figures) -> str:
    hung = found["hung"]
    return (
        f"no new requests after {hung['out_s']:.1f} s, `down` after {hung['down_s']:.1f} s, the longest request takes"
        f" {hung['stopped']['max_s']:.1f} s"
    )


def _worker_and_standby(found: Figures) -> str:
    gaps = found["longest_gap_s"]
    return f"streams stand for up to {max(gaps['SIGKILL']):.1f} s (killed), {max(gaps['SIGSTOP']):.1f} s (stopped)"


def _loops(found: Figures) -> str:
    most = max(
        max(kind["num_requests"]) for kind in found.values() if isinstance(kind, dict) and "num_requests" in kind
    )
    return f"10 requests become {most:,.0f}"


def _lying_checkpoint(found: Figures) -> str:
    lies = [lie for lie in found.values() if isinstance(lie, dict) and "peak_MB" in lie]
    return (
        f"{len(lies)} lies, {sum(lie['has_traceback'] for lie in lies)} with a traceback; at most"
        f" {max(lie['peak_MB'] for lie in lies):,.0f} MB"
    )


def _record(found: Figures) -> str:
    kinds = [found["route"], found["serve"]]
    read = "everyone" if any(kind["others_can_read"] for kind in kinds) else "its owner alone"
    guess = "confirms" if any(kind["guess_confirmed"]["right"] for kind in kinds) else "confirms no"
    after = "goes on" if all(kind["bytes_recorded_afterwards"] for kind in kinds) else "has ended"
    return f"{read} can read it, it {guess} guesses of a prompt; it {after} after a full disk"


def _shares(found: Figures) -> str:
    def failed(kind: Figures) -> str:
        ends = kind["honest"]["ends"]
        return f"{sum(ends.values()) - ends.get('200', 0)} of {sum(ends.values())}"

    connections = [failed({"honest": product}) for product in found["connections"].values()]
    return (
        f"honest requests that fail: {failed(found['retries'])} (retries used up), {' and '.join(connections)}"
        f" (4,096 idle connections to each product), {failed(found['grammars'])} (new grammars)"
    )


_ATTACKS: dict[str, tuple[str, Callable[[Figures], str]]] = {
    "poison": ("8 clients send requests that end in 500, a cut answer, a hang, 429 or 503 on every engine", _poison),
    "gzip_bomb": ("bodies that unpack to 1.5 GB, on all four ports, with and without a key", _gzip_bomb),
    "grammars": ("16 clients send grammars that cost seconds and gigabytes, each time other ones", _grammars),
    "heavy_requests": ("the largest requests of 19 kinds: texts, tools, edits, scores, choices", _heavy_requests),
    "kv_events": ("messages of KV events that are huge, endless, slow or lie", _kv_events),
    "kv_publisher": ("subscribers of KV events that send endless frames, or do not read", _kv_publisher),
    "any_json": ("any JSON text on every endpoint of both products and both operators' ports", _any_json),
    "raw_http": ("bytes that are not HTTP, early ends, control bytes in keys", _raw_http),
    "hung_engine": ("an engine's API server is stopped", _hung_engine),
    "worker_and_standby": ("the only worker of some experts and a process on standby end at once", _worker_and_standby),
    "loops": ("a router has itself as an engine, directly or by way of another", _loops),
    "lying_checkpoint": ("files of a checkpoint with impossible sizes, links, FIFOs and numbers", _lying_checkpoint),
    "record": ("reads a record, and fills its disk", _record),
    "shares": ("takes all that it can of what clients share", _shares),
}
