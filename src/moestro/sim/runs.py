"""The runs of a simulation: each policy with each seed, one after the other or on all cores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import msgspec

from moestro.config.cores import num_cores, run_jobs
from moestro.sim.figures.results import Results
from moestro.sim.figures.show import REQUESTS_PER_UPDATE
from moestro.sim.groups.group_figures import GroupFigures
from moestro.sim.load.arrivals import Int64s
from moestro.sim.scenario import OnArrival, Scenario, make_scenario, run_with_figures
from moestro.sim.settings import SimSettings
from moestro.workload.progress import progress
from moestro.workload.requests import RequestMaker

# Requests of all runs together from which processes pay: the start of one takes as long as some thousand requests.
_WORTH_PROCESSES = 20_000


@dataclass(frozen=True, slots=True, eq=False)
class RunJob:
    """One run.

    Attributes:
        settings: settings of the simulation, with the seed of the run.
        directory: directory of relative paths.
        policy: position of its policy in the settings.
    """

    settings: SimSettings
    directory: Path
    policy: int


@dataclass(frozen=True, slots=True, eq=False)
class RunAnswer:
    """Results of one run.

    Attributes:
        title: title of the policy.
        seed: seed of the run.
        results: outcome of each request.
        group: figures of the groups of workers. None where each engine computes alone.
        session: conversation of each request, int64[n]. None means unknown.
        notes: limits of the prices.
    """

    title: str
    seed: int
    results: Results
    group: GroupFigures | None
    session: Int64s | None
    notes: tuple[str, ...]


def run_all(settings: SimSettings, directory: Path, num_processes: int | None) -> Iterator[RunAnswer]:
    """Run every policy with every seed; answers come seed by seed, in the order of the policies.

    The results are the same with any number of processes.

    Args:
        directory: directory of relative paths.
        num_processes: processes to run in. None means one for each core if the runs are long enough.
    """
    seeded = [msgspec.structs.replace(settings, seed=settings.seed + i, num_seeds=1) for i in range(settings.num_seeds)]
    jobs = [RunJob(each, directory, policy) for each in seeded for policy in range(len(settings.policies))]
    if num_processes is None:
        num_requests = len(scenario_of(seeded[0], directory).workload) * len(jobs)
        num_processes = num_cores() if num_requests >= _WORTH_PROCESSES else 1
    if min(num_processes, len(jobs)) < 2:
        yield from map(_run_with_progress, jobs)
        return
    with progress(f"{len(jobs)} runs", len(jobs)) as advance:
        for answer in run_jobs(run_job, jobs, num_processes):
            advance()
            yield answer


def run_job(job: RunJob, on_arrival: OnArrival = None) -> RunAnswer:
    """Run one policy with one seed."""
    scenario = scenario_of(job.settings, job.directory)
    policy = job.settings.policies[job.policy]
    results, group = run_with_figures(scenario, policy, on_arrival)
    workload = scenario.workload
    session = workload.rows.session if isinstance(workload, RequestMaker) else None
    return RunAnswer(policy.title, job.settings.seed, results, group, session, tuple(scenario.prices.notes()))


@lru_cache(maxsize=1)
def scenario_of(settings: SimSettings, directory: Path) -> Scenario:
    """Make the scenario that `settings` describe, or return it if it is that of the last call."""
    return make_scenario(settings, directory)


def _run_with_progress(job: RunJob) -> RunAnswer:
    num_requests = len(scenario_of(job.settings, job.directory).workload)
    title = job.settings.policies[job.policy].title
    with progress(title, num_requests, REQUESTS_PER_UPDATE) as advance:
        return run_job(job, advance)
