"""The experiment beside other traffic: one request at a time, and no more of the time than the operator allows.

What other requests do is not chosen but read: the engine's own figures say how many sequences run, and how many tokens
they hold, while a probe is under way. So only costs are estimated, and the server has to show these figures.
"""

from __future__ import annotations

import statistics

from moestro.calibrate.probing.design import SHORT, ProbeDesign
from moestro.calibrate.probing.probes import ProbeAnswer, ProbedServer, ProbeLimits, Probing
from moestro.calibrate.probing.readings import BesideTime, DecodeTime, decode_time
from moestro.errors import MoestroError

_ANSWER = 24
_SIZES = (SHORT, 64, 256, 1024)
_LEAST_DURATIONS = 12
_NOT_PROBED = "not probed beside traffic, which would suffer from it: calibrate the idle server"


class BesideDesign(ProbeDesign):
    """The experiment beside traffic.

    Args:
        server: what is known of the server.
        limits: bounds of the experiment.
        seed: seed of the order of sizes.

    Attributes:
        observed: what it has observed.

    Raises:
        MoestroError: the server does not show what else runs.
    """

    def __init__(self, server: ProbedServer, limits: ProbeLimits, seed: int = 0) -> None:
        figures = server.figures
        if figures is None or figures.num_running is None or figures.kv_usage is None:
            raise MoestroError(
                "--max-added-load needs a server whose /metrics show its running requests and the use of its KV cache,"
                " and this one does not: calibrate it when it is idle, without the flag"
            )
        super().__init__(server, limits, _ANSWER, seed)
        for bounds in ("budget", "max_rows", "max_requests", "block_size", "capacity"):
            getattr(self.observed, bounds).why = _NOT_PROBED
        self._num_kv_tokens = figures.num_kv_tokens
        self._sizes = [size for size in _SIZES if size <= self._longest]

    def run(self) -> Probing:
        """Yield single requests until the time is over.

        Raises:
            MoestroError: the server refuses or fails a probe, or too few of them found room in the time.
        """
        seen = self.observed
        while not self._is_over(1):
            for size in self._rng.permutation(self._sizes).tolist():
                answer = yield from self._send("beside", self._alone(size, _ANSWER))
                self._read(answer)
                if self._is_over(1):
                    break
            seen.num_rounds += 1
        if len(seen.decodes) < _LEAST_DURATIONS:
            raise MoestroError(
                f"only {len(seen.decodes)} of {_LEAST_DURATIONS} durations could be measured in"
                f" --seconds {self._limits.seconds:g} with --max-added-load {self._limits.max_added_load:g}: give more"
                " of one of them"
            )
        self._honesty.at_end(seen.decodes, None, None)

    def _read(self, answer: ProbeAnswer) -> None:
        running = [each.num_running for each in answer.meanwhile if each.num_running]
        usage = [each.kv_usage for each in answer.meanwhile if each.kv_usage is not None]
        time = decode_time(answer)
        if time is None or not running or not usage:
            return
        # The probe is one of the running sequences in any case.
        rows = max(statistics.fmean(running), 1.0)
        own = time.context
        context = max(statistics.fmean(usage) * self._num_kv_tokens, own) if self._num_kv_tokens else own * rows
        seen, times = self.observed, answer.requests[0]
        seen.decodes.append(DecodeTime(rows=rows, context=context, ns=time.ns))
        seen.longest = max(seen.longest, times.num_prompt_tokens)
        seen.beside.append(
            BesideTime(rows=rows - 1, context=max(context - own, 0.0), new=times.num_prompt_tokens, ns=times.ttft_ns)
        )
