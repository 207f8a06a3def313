"""Compares the estimates by which `moestro plan` cuts its search with the simulations that they stand for.

    python bench/simulator/plan_estimates.py [--seeds 2] [--json bench/results/simulator/plan_estimates.json]

Every deployment that fits is estimated and simulated at numbers of requests from few to what fits its memory, for
several networks, GPUs, lengths and popularities of experts. The search leaves a deployment out if its estimate times an
allowance (`planner.plan.ALLOWANCE`, `ASYNC_ALLOWANCE`) is below a throughput that was simulated. So a quotient of
simulated and estimated throughput above the allowance is a deployment that might be left out wrongly. Everything is
simulated, and the same on every machine.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from moestro.config.run_record import run_record
from moestro.planner.divisions import GpuDivision, divisions_of, memory_of
from moestro.planner.plan import ALLOWANCE, ASYNC_ALLOWANCE
from moestro.planner.question import make_question
from moestro.planner.settings import HardwareSettings, PlanSettings, TrafficSettings
from moestro.planner.simulated import Estimator, FittingDivision
from moestro.workload.progress import progress

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save, spread

# (network, GPU, GPUs, lengths of prompts and answers, popularity of experts)
QUESTIONS = (
    ("mixtral-8x7b", "a100", 4, (64, 64), "zipf:0.6"),
    ("mixtral-8x7b", "a100", 8, (512, 128), "exponential:0.53"),
    ("mixtral-8x7b", "h200", 4, (1024, 256), "uniform"),
    ("qwen3-30b-a3b", "a100", 4, (512, 128), "zipf:0.6"),
    ("qwen3-30b-a3b", "h200", 8, (64, 64), "exponential:0.53"),
    ("deepseek-v3", "h200", 8, (512, 128), "zipf:0.6"),
)
SHARES = (0.01, 0.1, 0.5)  # of the requests that fit
MOST_ASYNC = 512  # requests of a group in `async`, whose runs take long
FEW_ASYNC = 64  # and with many small experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One deployment of one question with a number of requests; throughput in tokens a second."""

    question: tuple[object, ...]
    deployment: str
    mode: str
    num_requests: int
    seed: int
    estimated: float
    simulated: float

    @property
    def quotient(self) -> float:
        return self.simulated / self.estimated


def fitting_of(case: tuple) -> list[FittingDivision]:
    """Return the deployments of a question that fit, `async` in one group of all GPUs alone."""
    network, gpu, num_gpus, (isl, osl), popularity = case
    settings = PlanSettings(
        model=network,
        hardware=HardwareSettings(gpu=gpu, num_gpus=num_gpus),
        traffic=TrafficSettings(isl=isl, osl=osl, popularity=popularity),
    )
    question = make_question(settings)
    uses = {division: memory_of(question, division) for division in divisions_of(question)}
    return [
        FittingDivision(question, division, memory)
        for division, memory in uses.items()
        if memory.why_not is None and is_tried(division, num_gpus)
    ]


def is_tried(division: GpuDivision, num_gpus: int) -> bool:
    """Whether a deployment is compared: of `async`, one without a division and one with half of the GPUs."""
    if division.mode != "async":
        return True
    return division.gpus_per_group == num_gpus and division.num_expert_workers in (0, num_gpus // 2)


def numbers_of(fitting: FittingDivision) -> list[int]:
    """Return the numbers of requests at which a deployment is compared."""
    most = fitting.most_requests
    if fitting.division.mode == "async":
        experts = fitting.question.network.experts
        many = experts is not None and experts.num_experts > 16
        most = min(most, fitting.division.num_groups * (FEW_ASYNC if many else MOST_ASYNC))
        return [most]
    return sorted({max(round(most * share), fitting.num_engines) for share in SHARES})


def compare(fitting: FittingDivision, case: tuple, number: int, seed: int) -> Point:
    return Point(
        question=case,
        deployment=fitting.division.title,
        mode=fitting.division.mode,
        num_requests=number,
        seed=seed,
        estimated=Estimator(seed).estimate(fitting, number).tokens_per_s,
        simulated=fitting.run(number, seed).tokens_per_s,
    )


def main() -> int:
    """Compare all; the exit status is 1 if a quotient is above its allowance."""
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--questions", type=int, nargs="+", default=range(len(QUESTIONS)), help="numbers, from 0")
    options = parser.parse_args()
    conditions = run_record("simulated")
    tasks = [
        (fitting, case, number, seed)
        for case in (QUESTIONS[each] for each in options.questions)
        for fitting in fitting_of(case)
        for number in numbers_of(fitting)
        for seed in range(options.seeds)
    ]
    points = []
    with progress("plan_estimates", len(tasks)) as advance:
        for task in tasks:
            points.append(compare(*task))
            advance()
    beyond = []
    summary = {}
    for mode in sorted({point.mode for point in points}):
        own = [point for point in points if point.mode == mode]
        allowance = ASYNC_ALLOWANCE if mode == "async" else ALLOWANCE
        beyond += [point for point in own if point.quotient > allowance]
        summary[mode] = {"allowance": allowance, "runs": len(own), **spread([point.quotient for point in own])}
        print(f"{mode:11} simulated / estimated {summary[mode]}")
    for point in beyond:
        print(f"beyond its allowance: {point.quotient:.2f} {point.deployment}, {point.num_requests}, {point.question}")
    rows = [asdict(point) | {"quotient": point.quotient} for point in points]
    save(options.json, conditions, {"summary": summary, "points": rows})
    return bool(beyond)


if __name__ == "__main__":
    sys.exit(main())
