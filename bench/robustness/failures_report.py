"""The figures of `failures.py`: what became of the answers, gaps between tokens, and throughput around kills."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.completions import TOKENS, Answer

NEAR_TIE = 1e-5  # of the two best log probabilities in float32, whose rounding depends on the batch (design, section 2)
MOST_DIFFERING = 1e-4  # near-ties per token (design, section 2)
CALM_WINDOW_S = 3.0
SERIES_BIN_S, AROUND_BIN_S = 0.5, 0.1
AROUND_S = (-2.0, 5.0)
BROKEN = ("lost", "doubled", "differing")


@dataclass(frozen=True, slots=True)
class Calm:
    """A calm server's answer.

    Attributes:
        offsets: of a greedy answer, the place of each token in the text, in characters. Empty if sampled.
        gaps: of a greedy answer, by token, log probability of the best token minus that of the second.
    """

    text: str
    offsets: list[int]
    gaps: list[float]

    @classmethod
    def of(cls, choice: dict[str, Any]) -> Calm:
        """Read a choice of an answer, which has log probabilities if it is greedy."""
        if not (scores := choice.get("logprobs")):
            return cls(choice["text"], [], [])
        best = [sorted(top.values(), reverse=True) for top in scores["top_logprobs"]]
        # Two tokens of the same text share an entry; such a place is never called a near-tie.
        gaps = [top[0] - top[1] if len(top) > 1 else float("inf") for top in best]
        return cls(choice["text"], scores["text_offset"], gaps)

    def gap_at_difference(self, text: str) -> float:
        """Return the smaller gap of the two tokens where a greedy answer may have begun to differ.

        A token may begin with the whole text of another. Then the first character that differs belongs to the token
        after the one that was chosen differently.
        """
        pairs = enumerate(zip(self.text, text, strict=False))
        first = next((i for i, (ours, theirs) in pairs if ours != theirs), min(len(self.text), len(text)))
        at = bisect_right(self.offsets, first) - 1
        return min(self.gaps[max(0, at - 1) : at + 1])


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill.

    Attributes:
        at: time.monotonic() of the signal.
        signal: name of the signal.
        worker: name of the process.
        dead_s: time from the signal to the process's death, in seconds; after SIGSTOP, the server's notice.
        whole_s: time from the signal until all workers served again, in seconds.
    """

    at: float
    signal: str
    worker: str
    dead_s: float
    whole_s: float


@dataclass(frozen=True, slots=True)
class Run:
    """Observations of one server.

    Attributes:
        began: time.monotonic() of the first request.
        calm_until: end of the load without kills.
        ended: moment after which users sent no more requests.
        sent: answers, each with the number of its body.
        counters: the server's counters of failures.
        idle: share of a core and memory of each process without load.
    """

    began: float
    calm_until: float
    ended: float
    kills: list[Kill]
    sent: list[tuple[int, Answer]]
    counters: dict[str, int]
    idle: dict[str, dict[str, float]]


def report(run: Run, calm: list[Calm]) -> dict[str, Any]:
    """Return the figures of a run."""
    tokens = _token_times(run)
    until = [*(kill.at for kill in run.kills[1:]), run.ended]
    stalls = [longest_gap_s(run, kill.at, end) for kill, end in zip(run.kills, until, strict=True)]
    windows = np.arange(run.began, run.calm_until - CALM_WINDOW_S + 1e-9, CALM_WINDOW_S)
    kinds = {kill.signal: [i for i, each in enumerate(run.kills) if each.signal == kill.signal] for kill in run.kills}
    return {
        "answers": count_answers(run, calm),
        "tokens": sum(answer.num_tokens for _, answer in run.sent),
        "stall_s": {kind: spread([stalls[i] for i in which]) for kind, which in kinds.items()},
        "calm_window_stall_s": spread([longest_gap_s(run, at, at + CALM_WINDOW_S) for at in windows]),
        "dead_s": {kind: spread([run.kills[i].dead_s for i in which]) for kind, which in kinds.items()},
        "whole_s": {kind: spread([run.kills[i].whole_s for i in which]) for kind, which in kinds.items()},
        "tokens_per_s": {
            "calm": rate(tokens, run.began, run.calm_until),
            "under_kills": rate(tokens, run.calm_until, run.ended),
        },
        "counters": run.counters,
        "idle": run.idle,
        "kills": [
            {"s": round(kill.at - run.began, 2), "signal": kill.signal, "worker": kill.worker, "stall_s": round(gap, 3)}
            for kill, gap in zip(run.kills, stalls, strict=True)
        ],
        "series": {"bin_s": SERIES_BIN_S, "tokens_per_s": histogram(tokens, run.began, run.ended, SERIES_BIN_S)},
        "around": {
            "bin_s": AROUND_BIN_S,
            "from_s": AROUND_S[0],
            "signals": {kind: around(tokens, [run.kills[i].at for i in which]) for kind, which in kinds.items()},
        },
    }


def count_answers(run: Run, calm: list[Calm]) -> dict[str, int]:
    """Count the answers by what became of them, and print each one that differs."""
    found = Counter(dict.fromkeys(("equal", "near_ties", "sampled_differing", *BROKEN), 0))
    for which, answer in run.sent:
        kind = judge(answer, calm[which])
        found[kind] += 1
        if kind in ("lost", "doubled"):
            print(f"{kind}: body {which}: {answer.end}, {answer.num_tokens} tokens of {TOKENS}")
        elif kind != "equal":
            gap = f", gap {calm[which].gap_at_difference(answer.text):.2e}" if calm[which].gaps else ""
            print(f"{kind}: body {which}{gap}: {answer.text!r} instead of {calm[which].text!r}")
    return dict(found)


def judge(answer: Answer, calm: Calm) -> str:
    """Name what became of an answer."""
    if answer.end != "answered whole" or answer.num_tokens < TOKENS:
        return "lost"
    if answer.num_tokens > TOKENS:
        return "doubled"
    if answer.text == calm.text:
        return "equal"
    if not calm.gaps:
        return "sampled_differing"
    return "near_ties" if calm.gap_at_difference(answer.text) < NEAR_TIE else "differing"


def broken_promises(ways: dict[str, Any]) -> list[str]:
    """Return a line for each promise that a way broke."""
    found = []
    for name, figures in ways.items():
        answers = figures["answers"]
        found += [f"{name}: {answers[kind]} {kind}" for kind in BROKEN if answers[kind]]
        num_differing = answers["near_ties"] + answers["sampled_differing"]
        if num_differing > max(1, MOST_DIFFERING * figures["tokens"]):
            found.append(f"{name}: {num_differing} near-ties in {figures['tokens']} tokens")
    return found


def longest_gap_s(run: Run, since: float, until: float) -> float:
    """Return the longest of the gaps between tokens of all streams, as `Answer.longest_gap_s` defines them."""
    return max((answer.longest_gap_s(since, until) for _, answer in run.sent), default=0.0)


def spread(values: list[float]) -> dict[str, float]:
    """Return median, 99th percentile, maximum and number of values in seconds."""
    if not values:
        return {"num": 0}
    p50, p99 = np.percentile(values, (50, 99))
    return {"p50": round(p50, 3), "p99": round(p99, 3), "max": round(max(values), 3), "num": len(values)}


def _token_times(run: Run) -> np.ndarray:
    """Return the sorted times of all tokens of streams, by time.monotonic()."""
    times = []
    for _, answer in run.sent:
        before = 0
        for at, num_tokens in answer.chunks:
            times += [at] * (num_tokens - before)
            before = num_tokens
    return np.sort(np.array(times))


def rate(tokens: np.ndarray, since: float, until: float) -> float:
    """Return the tokens per second in [since, until)."""
    first, last = np.searchsorted(tokens, (since, until))
    return round(float(last - first) / (until - since), 1)


def histogram(tokens: np.ndarray, since: float, until: float, bin_s: float) -> list[float]:
    """Return the tokens per second in each whole bin of [since, until)."""
    edges = since + bin_s * np.arange(int((until - since) / bin_s) + 1)
    return [round(float(num) / bin_s, 1) for num in np.diff(np.searchsorted(tokens, edges))]


def around(tokens: np.ndarray, moments: list[float]) -> dict[str, list[float]]:
    """Return the tokens per second in bins around the kills: median, 10th and 90th percentile over the kills."""
    num_bins = round((AROUND_S[1] - AROUND_S[0]) / AROUND_BIN_S)
    edges = AROUND_S[0] + AROUND_BIN_S * np.arange(num_bins + 1)
    rows = [np.diff(np.searchsorted(tokens, at + edges)) / AROUND_BIN_S for at in moments]
    if not rows:
        return {"median": [], "p10": [], "p90": []}
    median, p10, p90 = np.percentile(rows, (50, 10, 90), axis=0).round(1).tolist()
    return {"median": median, "p10": p10, "p90": p90}
