"""Measures host memory below the prefix cache on a CPU, beside what the simulator says of the same sessions.

    OMP_NUM_THREADS=1 python bench/serving/host_tier.py --work /tmp/bench --models demo \\
        [--rounds 5] [--json bench/results/serving/host_tier.json]
    OMP_NUM_THREADS=1 python bench/serving/host_tier.py --work /tmp/bench --models random-640m \\
        [--rounds 5] [--json bench/results/serving/host_tier_640m.json]

Agents' sessions in closed loop: the next prompt is the last one with its answer and some new tokens, after a pause of a
tool (most) or of a person (a few). One engine in this process serves them: production rank, scheduler, host tier and
network. Its clock is the processor time of the process; time without work is skipped, so minutes of pauses cost
nothing. For the demo model the clock is corrected for the machine's speed, since other tenants of a virtual machine
slow its memory for seconds: it times a fixed decode and a fixed chunk between steps, and divides processor time by how
much longer they take than at the start. The 640M model waits for its weights, and the time of such trials depends on
what the caches hold, so its clock has no correction: what else runs must run all the time.

A round draws new sessions, and serves them without a tier, with as much host memory as KV memory, and with four times
as much. Longer pauses make more KV live at the same rate: the mean over time of the contexts of sessions that have
begun and not ended, as a multiple of the KV memory.

The simulator gets the same sessions, and a cost table that `moestro calibrate` measures of the same device with the
same clock, anew for each pause. The first quarter of the requests is in no figure.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from moestro.calibrate.runner import host_copies, measure
from moestro.calibrate.settings import Measuring
from moestro.calibrate.shapes import Limits, chunk, decodes, forward
from moestro.config.run_record import run_record
from moestro.core.hashing import hash_blocks, hash_key
from moestro.core.request import ModelInfo, Request, SamplingParams
from moestro.core.work import Forward, StepResult
from moestro.cost.tables import MeasuredCost, Table
from moestro.engine.rank import Rank, build_rank
from moestro.engine.settings import SchedulerSettings
from moestro.engine.steps import StepOutput
from moestro.model.device import TorchDevice, open_device
from moestro.model.settings import ModelSettings
from moestro.routing.registry import policy_from
from moestro.routing.router import Router
from moestro.routing.settings import EngineSpec, RouterSettings
from moestro.sim.cluster import Cluster
from moestro.sim.groups.group import Group, OneRank
from moestro.sim.results import ANSWERED, Results
from moestro.workload.generated.sessions import App, LogNormal, Mixture, Sessions, SessionShape, steady_sessions
from moestro.workload.rows import RequestForm, RequestMaker

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.models import DEMO, make_random_model
from shared.results import make_parser, save
from simulator.host_tier import figures_of, live_tokens

BLOCK_SIZE, VOCAB, FIRST_TOKEN = 16, 4096, 3
LONGEST, MAX_SEQS, BUDGET = 800, 8, 512
SIZES = (0, 1, 4)  # host memory over KV memory
_HASH_KEY = hash_key("bench")
_FIRST_TRIALS, _SMOOTHED = 9, 3  # that set the usual time, and whose mean is the present one
_DEVICE_BLOCKS, _TRIAL_BLOCKS = 1024, 64  # of the device, for its calibration, and the last ones for trials
SHAPE = SessionShape(
    like="coding agents, scaled to a small network",
    single_share=0.15,
    mean_turns=10.0,
    apps=(App(0.5, 64), App(0.5, 48)),
    num_users=100,
    user_skew=0.5,
    user_tokens=None,
    first_tokens=LogNormal(120, 0.6),
    next_tokens=LogNormal(24, 0.8),
    output_tokens=LogNormal(12, 0.5),
    think_s=LogNormal(1.0, 1.0),  # replaced by `paused`
    max_model_len=640,  # and all clients ask for the longest answer in the simulation
)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A network and its load.

    Attributes:
        num_blocks: blocks of the engine's KV memory.
        requests: of a round and a case.
        rate: requests a second.
        tools_s: medians of the tools' pauses, s; those of persons are 20 times as long. Each gives one case.
        work_per_trial: time of work after which the clock makes a trial, in trials; infinite: it makes none.
    """

    num_blocks: int
    requests: int
    rate: float
    tools_s: tuple[float, ...]
    work_per_trial: float


SUBJECTS = {  # pauses for live KV of some 1.3, 2.4 and 3.7 times the memory
    "demo": Subject(num_blocks=128, requests=300, rate=6.0, tools_s=(0.5, 1.9, 4.0), work_per_trial=10),
    "random-640m": Subject(num_blocks=52, requests=80, rate=0.15, tools_s=(18.0, 48.0, 184.0), work_per_trial=math.inf),
}


def paused(tool_s: float) -> SessionShape:
    """Return the shape with pauses of tools and of persons."""
    return replace(SHAPE, think_s=Mixture(0.89, LogNormal(tool_s, 0.8), LogNormal(20 * tool_s, 0.8)))


class TimedDevice:
    """A device, and a clock of processor time that is corrected for the machine's speed.

    A trial is a decode and a chunk on blocks that no request has. The clock makes trials between steps, does not count
    their time, and divides all other processor time by how much longer they take than the first trials.

    Args:
        device: computes the steps.
        limits: of the engine that uses it.
        work_per_trial: as in `Subject`.

    Attributes:
        slowness: time of each trial over that of the first ones.
    """

    def __init__(self, device: TorchDevice, limits: Limits, work_per_trial: float) -> None:
        self.device, self.slowness = device, [1.0]
        self._work_per_trial = work_per_trial
        self._limits, self._rng, self._num_running = limits, np.random.default_rng(0), 0
        self._time_ns, self._used_ns, self._seen_ns, self._timed_ns = 0.0, 0, 0, 0
        first = [self._trial_ns() for _ in range(_FIRST_TRIALS)]
        self._usual_ns = statistics.median(first)
        self._seen_ns = self._timed_ns = time.process_time_ns()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.device, name)

    def launch(self, item: Forward, now_ns: int) -> None:
        """Implement `Device.launch`."""
        self._num_running += 1
        self.device.launch(item, now_ns)

    def poll(self, now_ns: int) -> list[StepResult]:
        """Implement `Device.poll`."""
        results = self.device.poll(now_ns)
        self._num_running -= len(results)
        return results

    def clock_ns(self) -> int:
        """Return the corrected processor time, ns."""
        now_ns = time.process_time_ns()
        self._time_ns += (now_ns - self._seen_ns) / statistics.mean(self.slowness[-_SMOOTHED:])
        self._seen_ns = now_ns
        if not self._num_running and now_ns - self._timed_ns > self._work_per_trial * self._usual_ns:
            self.slowness.append(self._trial_ns() / self._usual_ns)
            self._seen_ns = self._timed_ns = time.process_time_ns()
        return round(self._time_ns)

    def _trial_ns(self) -> int:
        begun_ns = time.process_time_ns()
        for batch in (decodes([200] * 3), chunk(48, 160)):
            item = forward(batch, self._limits, self._rng)
            item.units.block_tables[:] += self._limits.num_blocks - _TRIAL_BLOCKS
            self.device.launch(item, 0)
            while not self.device.poll(0):
                pass
        return time.process_time_ns() - begun_ns


class EngineClock:
    """Time of the engine while it works, and the time that was skipped while it did not."""

    def __init__(self, device: TimedDevice) -> None:
        self._device = device
        self._skipped_ns = -device.clock_ns()

    def now_ns(self) -> int:
        """Return the time since the start, ns."""
        return self._device.clock_ns() + self._skipped_ns

    def skip_to(self, time_ns: int) -> None:
        """Skip the time until then."""
        self._skipped_ns += max(time_ns - self.now_ns(), 0)


class ClosedLoop:
    """One engine that serves sessions, whose clients answer with the engine's own tokens.

    Args:
        rank: the engine.
        device: its device, which has the clock.
        sessions: the load; its rows give lengths and pauses alone.
        seed: of the clients' tokens.
    """

    def __init__(self, rank: Rank, device: TimedDevice, sessions: Sessions, seed: int) -> None:
        self._rank, self._sessions, self._clock = rank, sessions, EngineClock(device)
        self._tokens = np.random.default_rng([seed, 1])
        self._heads = [self._tokens.integers(FIRST_TOKEN, VOCAB, LONGEST, dtype=np.int32) for _ in SHAPE.apps]
        self._due = list(zip(sessions.start_ns.tolist(), sessions.first_rows.tolist(), strict=True))
        self._history: dict[int, np.ndarray] = {}  # by session
        self._row_of: dict[str, int] = {}
        self.results = Results(len(sessions.rows), 1, tells_prefill=False)

    def run(self) -> Results:
        """Serve all sessions, and return the times of all requests."""
        rank, clock = self._rank, self._clock
        while self._due or rank.has_work:
            if not rank.has_work:
                clock.skip_to(self._due[0][0])
            while self._due and self._due[0][0] <= clock.now_ns():
                arrival_ns, row = heappop(self._due)
                self._send(row, arrival_ns)
            output = rank.collect(clock.now_ns())
            self._take(output, clock.now_ns())
            rank.begin(clock.now_ns())
        return self.results

    def _send(self, row: int, arrival_ns: int) -> None:
        rows = self._sessions.rows
        assert rows.session is not None, "turns belong to sessions"
        assert rows.stream is not None, "and are beginnings of streams"
        assert rows.streams is not None, "and are beginnings of streams"
        session, num_prompt = int(rows.session[row]), int(rows.num_prompt_tokens[row])
        prompt = self._history.get(session)
        if prompt is None:
            segments = rows.streams.segments(int(rows.stream[row]))
            num_head = segments[1][1] if len(segments) > 1 else 0
            prompt = self._heads[segments[0][0] % len(self._heads)][:num_head]
        new = self._tokens.integers(FIRST_TOKEN, VOCAB, num_prompt - len(prompt), dtype=np.int32)
        self._history[session] = prompt = np.concatenate([prompt, new])
        request = Request(
            request_id=f"row-{row}",
            num_prompt_tokens=num_prompt,
            sampling=SamplingParams(temperature=0.0, max_tokens=int(rows.num_output_tokens[row])),
            arrival_ns=arrival_ns,
            token_ids=prompt.tobytes(),
            block_hashes=hash_blocks(_HASH_KEY, prompt, BLOCK_SIZE),
            hash_key=_HASH_KEY,
        )
        self._row_of[request.request_id] = row
        self.results.arrival_ns[row], self.results.num_prompt_tokens[row] = arrival_ns, num_prompt
        self._rank.add(request, arrival_ns)

    def _take(self, output: StepOutput, now_ns: int) -> None:
        results, rows = self.results, self._sessions.rows
        assert rows.session is not None
        for sequence in output.sequences:
            row = self._row_of[sequence.request.request_id]
            if results.first_token_ns[row] < 0:
                results.first_token_ns[row] = now_ns
        for ended in output.finish_reasons:
            sequence = output.sequences[ended]
            row = self._row_of.pop(sequence.request.request_id)
            results.last_token_ns[row], results.status[row] = now_ns, ANSWERED
            results.num_tokens[row] = len(sequence.generated)
            results.num_hit_tokens[row] = sequence.num_cached_tokens or 0
            results.num_host_tokens[row] = sequence.num_host_tokens
            session = int(rows.session[row])
            self._history[session] = np.concatenate([self._history[session], sequence.generated])
            if (following := self._sessions.next_turn(row, now_ns)) is not None:
                heappush(self._due, (following[1], following[0]))


def bounds_of(num_blocks: int, size: int, info: ModelInfo) -> SchedulerSettings:
    """Return the settings of an engine with `size` times its KV memory on the host."""
    return SchedulerSettings(
        num_blocks=num_blocks, num_host_blocks=size * num_blocks, block_bytes=info.block_bytes, block_size=BLOCK_SIZE,
        max_model_len=LONGEST, max_num_seqs=MAX_SEQS, max_num_batched_tokens=BUDGET,
    )  # fmt: skip


def simulate(table: Table, bounds: SchedulerSettings, sessions: Sessions) -> Results:
    """Serve the same sessions by the simulator, with the prices of a table."""
    router = Router(policy_from("round_robin"), RouterSettings(block_size=BLOCK_SIZE))
    spec = EngineSpec(num_blocks=bounds.num_blocks, num_host_blocks=bounds.num_host_blocks)
    router.set_routable(router.add_engine(spec), routable=True)
    group = Group(bounds, OneRank(MeasuredCost(table), copies_beside=False))
    workload = RequestMaker(sessions.rows, RequestForm(block_size=BLOCK_SIZE))
    results = Cluster([group], router).run(workload, sessions)
    assert results.is_answered.all(), results.refusals
    return results


def limits_of(info: ModelInfo) -> Limits:
    """Return the limits of the device."""
    return Limits(
        max_model_len=LONGEST, max_num_seqs=MAX_SEQS, max_num_batched_tokens=BUDGET, num_blocks=info.num_blocks,
        block_size=BLOCK_SIZE, vocab_size=VOCAB,
    )  # fmt: skip


def calibrated(device: TimedDevice, info: ModelInfo) -> Table:
    """Measure the cost table of the device in the time of its clock."""
    limits = replace(limits_of(info), num_blocks=info.num_blocks - _TRIAL_BLOCKS)
    table, _ = measure(device, limits, Measuring(rounds=2, num_checks=1), device.clock_ns)
    return msgspec.structs.replace(table, device="cpu", copies=host_copies(info))


def measured(device: TimedDevice, info: ModelInfo, subject: Subject, seed: int) -> list[dict[str, object]]:
    """Serve a round's sessions in each case; return the measured and the simulated figures."""
    found = []
    for tool_s in subject.tools_s:
        sessions = steady_sessions(paused(tool_s), subject.requests, subject.rate, seed)
        assert sessions.rows.session is not None
        table = calibrated(device, info)
        for size in SIZES:
            bounds = bounds_of(subject.num_blocks, size, info)
            rank = build_rank(bounds, device, host_block_ns=info.host_block_ns)
            num_trials = len(device.slowness)
            results = ClosedLoop(rank, device, sessions, seed).run()
            rank.scheduler.check()
            found.append(
                {
                    "tool_s": tool_s,
                    "host memory": size,
                    "seed": seed,
                    "live_kv": live_tokens(sessions.rows.session, results) / (subject.num_blocks * BLOCK_SIZE),
                    "slowness": np.percentile(device.slowness[num_trials - 1 :], [10, 50, 90]).tolist(),
                    "measured": figures_of(results),
                    "simulated": figures_of(simulate(table, bounds, sessions)),
                }
            )
            print(found[-1], file=sys.stderr, flush=True)
    return found


def summary(runs: list[dict], tool_s: float, size: int) -> dict[str, object]:
    """Return the means over rounds of one case, and the simulation's error of the mean TTFT."""
    of_case = [each for each in runs if (each["tool_s"], each["host memory"]) == (tool_s, size)]
    means = {
        side: {name: statistics.mean(each[side][name] for each in of_case) for name in of_case[0][side]}
        for side in ("measured", "simulated")
    }
    ttft = [each["measured"]["ttft_mean_ms"] for each in of_case]
    return {
        "tool_s": tool_s,
        "host memory": size,
        "live_kv": statistics.mean(each["live_kv"] for each in of_case),
        **means,
        "ttft_range_ms": [min(ttft), max(ttft)],
        "ttft_error": means["simulated"]["ttft_mean_ms"] / means["measured"]["ttft_mean_ms"] - 1,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for the random model")
    parser.add_argument("--models", default=",".join(SUBJECTS))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    conditions, found = run_record("measured"), {}
    for model in args.models.split(","):
        subject = SUBJECTS[model]
        directory = DEMO if model == "demo" else make_random_model(args.work / model)
        settings = ModelSettings(
            model=str(directory), device="cpu", max_model_len=LONGEST, block_size=BLOCK_SIZE,
            num_gpu_blocks_override=_DEVICE_BLOCKS, kv_offloading_size=0.5,
        )  # fmt: skip
        opened, info = open_device(settings)
        assert info.num_host_blocks >= max(SIZES) * subject.num_blocks
        opened.network.finish_kernels()
        device = TimedDevice(opened, limits_of(info), subject.work_per_trial)
        runs = []
        for seed in range(args.rounds):
            runs += measured(device, info, subject, seed)
            cases = [summary(runs, tool_s, size) for tool_s in subject.tools_s for size in SIZES]
            found[model] = {"rounds": seed + 1, "cases": cases, "runs": runs}
            save(args.json, conditions, {"models": found})  # after each round
        print(f"\n{model}, {args.rounds} rounds\n| live KV | host memory | TTFT mean, P99, ms | simulated | error |")
        for each in found[model]["cases"]:
            real, priced = each["measured"], each["simulated"]
            print(
                f"| {each['live_kv']:.1f} x | {each['host memory']} x | {real['ttft_mean_ms']:.1f},"
                f" {real['ttft_p99_ms']:.0f} | {priced['ttft_mean_ms']:.1f}, {priced['ttft_p99_ms']:.0f} |"
                f" {each['ttft_error']:+.1%} | {real['device_hits']:.1%}, {real['host_hits']:.1%} |"
                f" {priced['device_hits']:.1%}, {priced['host_hits']:.1%} |"
            )


if __name__ == "__main__":
    main()
