"""Compares what `moestro plan` predicts with paced servers, measured through HTTP.

    # Starts the servers itself; about six minutes on two cores
    python bench/simulator/plan_check.py [--requests 32] [--ways NAME ...] \\
        [--json bench/results/simulator/plan_check.json]

Mixtral 8x7B on two H200, in the four deployments that two GPUs and our server have: two replicas, `ep` over both GPUs,
`async` with attention and experts on both, and `async` with attention on one and experts on the other. Each is started
by the command that the planner prints, with a dilation that leaves the two cores time for their own work. A constant
number of users send prompts of 64 tokens and get answers of 32. The first answer of each user has a random length, so
that requests end evenly, and does not count.

The planner's simulation has the paced devices' prices: hot experts are the same in all layers; `ep` prices experts one
by one, and replicas a grouped product. The host of `async` is a parameter: the time that an item took this machine
beside its modelled duration, divided by the dilation. A run with other prompts on the same server gives it, before the
run that is compared.

The engines get real-time priorities where the user may give them (root), and processes of the lowest priority keep the
cores awake. Otherwise engines wake up late: behind other processes, or because the core of a virtual machine halted.
A run is invalid if the devices' mean lateness exceeds 5 % of the mean duration of their items. The goal is 10 % for
throughput and ITL, and the same order of the deployments wherever predictions differ by more than that.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np

from moestro.config.run_record import run_record
from moestro.planner.divisions import GpuDivision, memory_of
from moestro.planner.plan import launch_of
from moestro.planner.question import make_question
from moestro.planner.settings import HardwareSettings, PlanSearchSettings, PlanSettings, TrafficSettings
from moestro.planner.simulated import FittingDivision, SimulatedPoint

sys.path.insert(0, str(Path(__file__).parents[1]))
from serving.async_ep_servers import Running, System, gained
from serving.async_ep_sim import HostTimes
from shared.completions import Answer, ask, session
from shared.results import make_parser, save
from shared.server import Server, free_port, moestro

ISL, OSL = 64, 32
NUM_ANSWERS = 2  # of each user, after the first
VOCABULARY = 4000  # ids that the demo model's tokenizer has
GOAL, MOST_LATENESS = 0.10, 0.05
PATIENCE_S = 600
REPORT_S = 1.3  # workers report once a second, and for the last time within a second after their last change
# About 330 items for each token of all requests in `async`, at 150 us of two cores each, need a dilation of 20.
WAYS = {
    "replicas": (GpuDivision("fused", 2, 1), 5.0),
    "ep": (GpuDivision("ep", 1, 2), 5.0),
    "async": (GpuDivision("async", 1, 2), 24.0),
    "async_1_1": (GpuDivision("async", 1, 2, 1), 24.0),
}


NO_HOST = HostTimes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One deployment, predicted and paced; times are divided by the dilation, but for those of the host."""

    way: str
    dilation: float
    host: HostTimes
    predicted_tokens_per_s: float
    paced_tokens_per_s: float
    predicted_itl_ms: float
    paced_itl_ms: float
    predicted_ttft_ms: float
    paced_ttft_ms: float
    lateness: float

    @property
    def is_valid(self) -> bool:
        return self.lateness <= MOST_LATENESS

    @property
    def error(self) -> float:
        return self.predicted_tokens_per_s / self.paced_tokens_per_s - 1

    @property
    def itl_error(self) -> float:
        return self.predicted_itl_ms / self.paced_itl_ms - 1


def fitting_of(division: GpuDivision, host: HostTimes = NO_HOST) -> FittingDivision:
    settings = PlanSettings(
        model="mixtral-8x7b",
        hardware=HardwareSettings(gpu="h200", num_gpus=2, link_within="nvswitch-h100"),
        traffic=TrafficSettings(isl=ISL, osl=OSL, hot_experts="same"),
        search=PlanSearchSettings(host_attention_us=host.attention_us, host_expert_us=host.expert_us),
    )
    question = replace(make_question(settings), groups_experts=division.mode == "fused", launch_ahead=1)
    return FittingDivision(question, division, memory_of(question, division))


async def user(client, url: str, seed: tuple[int, int], until_s: list[float]) -> list[tuple[float, float, Answer]]:
    """Ask one question after another; returns the start and the end of each answer but the first."""
    rng, found = np.random.default_rng(seed), []
    for turn in range(1 + NUM_ANSWERS):
        tokens = OSL if turn else int(rng.integers(1, OSL + 1))
        prompt = rng.integers(10, VOCABULARY, ISL).tolist()
        body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        begin_s = time.monotonic()
        answer = await ask(client, url, body, stream=True)
        assert answer.end == "answered whole", answer.end
        if turn:
            found.append((begin_s, time.monotonic(), answer))
    until_s.append(time.monotonic())
    return found


async def measure(server: Server, num_users: int, seed: int = 0) -> tuple[float, float, float]:
    """Return tokens a second, mean ITL and mean TTFT in seconds, while all users had requests in progress."""
    until_s: list[float] = []
    async with session(PATIENCE_S) as client:
        by_user = await asyncio.gather(*(user(client, server.url, (seed, each), until_s) for each in range(num_users)))
    answers = [each for found in by_user for each in found]
    from_s, to_s = max(found[0][0] for found in by_user), min(until_s)
    seen = [at for _, _, answer in answers for at, _ in answer.chunks if from_s <= at <= to_s]
    per_chunk = sum(answer.num_tokens for *_, answer in answers) / sum(len(answer.chunks) for *_, answer in answers)
    gaps = [(answer.chunks[-1][0] - answer.chunks[0][0]) / (answer.num_tokens - answer.chunks[0][1])
            for *_, answer in answers]  # fmt: skip
    waits = [answer.chunks[0][0] - begin_s for begin_s, _, answer in answers]
    return len(seen) * per_chunk / (to_s - from_s), fmean(gaps), fmean(waits)


def workers(server: Server, admin_port: int) -> list[dict]:
    """Return the figures of each worker of a group in `async` mode, after its last report."""
    time.sleep(REPORT_S)
    return Running(System("", "async", (), 0), server, admin_port).workers()


def host_of(spent: dict[str, dict[str, float]]) -> HostTimes:
    """Return the time beside modelled work in which a worker had something to do, for an item of each kind."""

    def mean_us(kind: str) -> float:
        own = [each for name, each in spent.items() if name.startswith(kind)]
        beside_ns = sum(each["lived_ns"] - each["idle_ns"] - each["item_ns"] for each in own)
        return beside_ns / max(sum(each["num_items"] for each in own), 1) / 1e3

    has_experts_alone = any(name.startswith("expert worker") for name in spent)
    experts = mean_us("expert worker" if has_experts_alone else "engine")
    return HostTimes(attention_us=mean_us("engine"), expert_us=experts)


def lateness(spent: dict[str, dict[str, float]]) -> float:
    """Return the largest lateness of a worker, as a share of its items' time."""
    return max((each["late_ns"] / max(each["item_ns"], 1) for each in spent.values()), default=0.0)


def lateness_of_engines(server: Server) -> float:
    spent = sum(server.samples("moestro:paced_item_seconds_total"))
    return sum(server.samples("moestro:paced_late_seconds_total")) / spent if spent else 0.0


def compare(way: str, num_requests: int) -> Comparison:
    division, dilation = WAYS[way]
    fitting = fitting_of(division)
    (line,) = fitting.question.system.commands(launch_of(fitting, num_requests))
    flags = shlex.split(line)[2:-2]  # without `moestro serve` and the port
    flags += ["--pace-dilation", str(dilation), "--log-level", "error", "--no-enable-prefix-caching"]
    admin_port, host = free_port(), NO_HOST
    if division.mode == "async":
        flags += ["--admin-port", str(admin_port), "--no-standby"]
    with moestro(free_port(), *flags, OMP_NUM_THREADS="1") as server, server.engines_first():
        if division.mode == "async":
            asyncio.run(measure(server, 2, seed=2))  # workers report nothing before their first item
            start = workers(server, admin_port)
            asyncio.run(measure(server, num_requests, seed=1))
            before = workers(server, admin_port)
            host = host_of(gained(start, before))
        tokens_per_s, itl_s, ttft_s = asyncio.run(measure(server, num_requests))
        late = lateness_of_engines(server) if host is NO_HOST else lateness(gained(before, workers(server, admin_port)))
    dilated = HostTimes(attention_us=host.attention_us / dilation, expert_us=host.expert_us / dilation)
    predicted: SimulatedPoint = fitting_of(division, dilated).run(num_requests, 0)
    return Comparison(
        way=way,
        dilation=dilation,
        host=host,
        predicted_tokens_per_s=predicted.tokens_per_s,
        paced_tokens_per_s=tokens_per_s * dilation,
        predicted_itl_ms=predicted.itl_ms,
        paced_itl_ms=itl_s / dilation * 1e3,
        predicted_ttft_ms=predicted.ttft_ms,
        paced_ttft_ms=ttft_s / dilation * 1e3,
        lateness=late,
    )


def show(each: Comparison) -> None:
    print(
        f"{each.way:10} tokens/s {each.predicted_tokens_per_s:7,.0f} predicted, {each.paced_tokens_per_s:7,.0f} paced"
        f" ({each.error:+.1%}); ITL {each.predicted_itl_ms:6.1f} / {each.paced_itl_ms:6.1f} ms ({each.itl_error:+.1%});"
        f" TTFT {each.predicted_ttft_ms:.0f} / {each.paced_ttft_ms:.0f} ms; x {each.dilation:g}, host"
        f" {each.host.attention_us:.0f}/{each.host.expert_us:.0f} us an item, {each.lateness:.1%}"
        f" late{'' if each.is_valid else ': INVALID'}",
        flush=True,
    )


def misordered(found: list[Comparison]) -> list[str]:
    """Pairs of deployments whose predictions differ by more than the goal, and whose paced order is the other."""
    valid = [each for each in found if each.is_valid]
    return [
        f"{high.way} before {low.way}"
        for high in valid
        for low in valid
        if high.predicted_tokens_per_s > low.predicted_tokens_per_s * (1 + GOAL)
        and high.paced_tokens_per_s < low.paced_tokens_per_s
    ]


def main() -> int:
    """Compare all ways; the exit status is 1 if a goal is missed or a run is invalid."""
    parser = make_parser(__doc__)
    parser.add_argument("--requests", type=int, default=32, help="users, each with one request at a time")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()
    conditions, found = run_record("paced"), []
    for way in options.ways:
        found.append(compare(way, options.requests))
        show(found[-1])
    wrong = misordered(found)
    missed = [each.way for each in found if each.is_valid and max(abs(each.error), abs(each.itl_error)) > GOAL]
    invalid = [each.way for each in found if not each.is_valid]
    print(f"wrong order: {wrong or 'none'}; beyond {GOAL:.0%}: {missed or 'none'}; invalid: {invalid or 'none'}")
    rows = [
        asdict(each) | {"error": each.error, "itl_error": each.itl_error, "is_valid": each.is_valid} for each in found
    ]
    save(options.json, conditions, {"requests": options.requests, "isl": ISL, "osl": OSL, "ways": rows, "wrong": wrong})
    return bool(wrong or missed or invalid)


if __name__ == "__main__":
    sys.exit(main())
