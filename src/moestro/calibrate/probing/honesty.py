"""Refuses to calibrate a server that does not do what the estimates suppose, with a sentence that says why."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from moestro.calibrate.probing.estimate import DecodeTime
from moestro.calibrate.probing.probes import (
    NoteList,
    ProbeAnswer,
    ProbedServer,
    ProbeLimits,
    ProbeRequest,
    RequestTimes,
    ServerFigures,
)
from moestro.errors import MoestroError

_OTHERS_SHARE = 0.05  # of probes that find other requests, and of tokens that are not the probes'
_LEAST_PROBES = 10  # before shares of them count
_UNSTEADY = 0.5  # range of the middle four fifths of steps, each over the median of its kind
_CONTEXTS_PER_OCTAVE = 4  # lengths of context that count as alike
_LEAST_REPEATS = 3  # of a kind of step
_SLACK_TOKENS = 64  # that a server may count for itself
_OVER_CAPACITY = 1.02
_MOST_EVENTS = 1.2  # tokens for each event of a stream, from which their times say less
_SHORT_ANSWER = 4


class Honesty:
    """Compares what a server answers and shows with what the probes requested.

    Args:
        server: what is known of the server.
        limits: bounds of the experiment.
        notes: takes sentences that are no reason to stop.

    Raises:
        MoestroError: the address serves several engines, between which the probes would be divided.
    """

    def __init__(self, server: ProbedServer, limits: ProbeLimits, notes: NoteList) -> None:
        self._limits, self._notes, self._first = limits, notes, server.figures
        self._is_beside = limits.max_added_load is not None
        self._num_probes = self._num_visited = 0
        self._num_own_tokens = 0
        self._last: ServerFigures | None = None
        if server.figures is None:
            notes.add("The server shows no /metrics that are known here: other traffic would not be noticed as such.")
        elif server.figures.num_engines > 1:
            raise MoestroError(
                f"the address serves {server.figures.num_engines} engines, among which the probes would be divided:"
                " start one engine, or give the address of one"
            )

    def check(self, kind: str, requests: Sequence[ProbeRequest], answer: ProbeAnswer) -> None:
        """Check one probe.

        Raises:
            MoestroError: the server refused or failed the probe, answered something else, or is busy.
        """
        self._check_failures(kind, answer.requests)
        for request, times in zip(requests, answer.requests, strict=True):
            if times.failure is None:
                self._check_answer(request, times)
                self._num_own_tokens += times.num_prompt_tokens + times.num_output_tokens
        self._num_probes += 1
        self._last = answer.after or self._last
        if not self._is_beside:
            self._check_idle(answer)

    def at_end(self, decodes: Sequence[DecodeTime], held_tokens: int | None, block_size: int | None) -> None:
        """Check what only the whole experiment shows.

        Raises:
            MoestroError: the same step took different times, or `/metrics` contradict the probes.
        """
        if not self._is_beside:
            _check_steady(decodes)
        if self._first is None or self._last is None:
            return
        self._check_counts(self._first, self._last)
        shown = self._last.num_kv_tokens
        if shown is not None and held_tokens is not None and held_tokens > shown * _OVER_CAPACITY:
            raise MoestroError(
                f"/metrics show a KV cache of {shown:,} tokens, and the probes found {held_tokens:,} tokens in it:"
                " these metrics are not of this engine. Nothing was fitted"
            )
        if block_size is not None and self._last.block_size not in {None, block_size}:
            self._notes.add(
                f"/metrics show blocks of {self._last.block_size} tokens, and prefixes are found in blocks of"
                f" {block_size}: the probed size is used."
            )

    def _check_failures(self, kind: str, requests: Sequence[RequestTimes]) -> None:
        failed = [each for each in requests if each.failure is not None]
        refused = [each for each in failed if each.is_refused]
        if len(refused) == len(requests):
            raise MoestroError(
                f"the server refused a probe ({kind}) with {(refused[0].failure or '').removeprefix('http_')}"
                f" ({refused[0].message or 'no message'}): it limits the rate of requests, or is full. Raise the limit"
                " of this key, or stop other traffic. Nothing was fitted"
            )
        others = [each for each in failed if not each.is_refused]
        if not others:
            return
        first = others[0]
        if first.failure == "timeout":
            raise MoestroError(
                f"the server is too slow for --seconds {self._limits.seconds:g}: a probe ({kind}) of {len(requests)}"
                " requests had no complete answer in the time that was left. Give more --seconds"
            )
        raise MoestroError(
            f"{len(others)} of {len(requests)} requests of a probe ({kind}) failed, the first with {first.failure}:"
            f" {first.message}. Nothing was fitted"
        )

    def _check_answer(self, request: ProbeRequest, times: RequestTimes) -> None:
        if times.num_output_tokens != request.max_tokens:
            raise MoestroError(
                f"an answer has {times.num_output_tokens} tokens where {request.max_tokens} were requested: the server"
                " does not honour ignore_eos, so that batches end at other times than planned. Nothing was fitted"
            )
        if request.max_tokens < _SHORT_ANSWER:
            return
        per_event = times.num_output_tokens / len(times.deliveries)
        if len(times.deliveries) < 3:
            raise MoestroError(
                f"{times.num_output_tokens} tokens arrived in {len(times.deliveries)} events: the server or a proxy"
                " before it holds the stream back, so that times of tokens are invisible. Give the engine's own address"
            )
        if per_event > _MOST_EVENTS:
            self._notes.add(
                f"An event of the stream brings {per_event:.1f} tokens: durations are means over them, and the token"
                " budget of a step is not identified reliably."
            )

    def _check_idle(self, answer: ProbeAnswer) -> None:
        """Look for other requests when no request of the probe was there."""
        if answer.after is None:
            return
        found = (answer.after.num_running or 0) + (answer.after.num_waiting or 0)
        self._num_visited += found > 0
        if self._num_probes >= _LEAST_PROBES and self._num_visited > _OTHERS_SHARE * self._num_probes + 1:
            raise MoestroError(
                f"the server is busy: {self._num_visited} of {self._num_probes} probes found other requests on it,"
                f" {found:g} at the last. Calibrate it when it is idle, or beside the traffic with"
                " --max-added-load 0.1. Nothing was fitted"
            )

    def _check_counts(self, first: ServerFigures, last: ServerFigures) -> None:
        if first.num_tokens is None or last.num_tokens is None:
            return
        counted, own = last.num_tokens - first.num_tokens, self._num_own_tokens
        if counted < own * (1 - _OTHERS_SHARE) - _SLACK_TOKENS:
            raise MoestroError(
                f"/metrics count {counted:,.0f} tokens during the probes, and the answers alone report {own:,}: these"
                " metrics are not of this engine, or of one of several behind the address. Nothing was fitted"
            )
        if counted > own * (1 + _OTHERS_SHARE) + _SLACK_TOKENS and not self._is_beside:
            raise MoestroError(
                f"the server is busy: /metrics count {counted:,.0f} tokens during the probes, which had {own:,}."
                " Calibrate it when it is idle, or beside the traffic with --max-added-load 0.1. Nothing was fitted"
            )


def _check_steady(decodes: Sequence[DecodeTime]) -> None:
    """Raise MoestroError if steps of equally many sequences in equally long contexts took different times."""
    alike: dict[tuple[int, int], list[float]] = {}
    for each in decodes:
        length = round(_CONTEXTS_PER_OCTAVE * math.log2(max(each.context, 1.0)))
        alike.setdefault((round(each.rows), length), []).append(each.ns)
    repeated = [np.array(times) for times in alike.values() if len(times) >= _LEAST_REPEATS]
    if not repeated:
        return
    # Each is compared with the median of its own kind, so that all of them count together.
    ratios = np.concatenate([times / np.median(times) for times in repeated])
    low, high = np.percentile(ratios, [10, 90]).tolist()
    if high - low > _UNSTEADY:
        raise MoestroError(
            f"the server is not steady: the same step took {low:.2f} to {high:.2f} times its median (the middle four"
            f" fifths of {len(ratios)} steps of {len(repeated)} kinds). Other traffic, or other processes on its"
            " machine, would be priced as its own work. Nothing was fitted"
        )
