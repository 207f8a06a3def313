"""Deployments of a network on a number of GPUs: groups of one mode, alike, that use every GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moestro.planner.question import PlanQuestion
from moestro.sim.groups.group_settings import SimMode

_MOST_RATIOS = 8  # of attention to expert workers that are tried in a group; more differ by little
_NAMES = {"ep": "ep", "ep-overlap": "ep-overlap", "afd": "ping-pong", "async": "async"}


@dataclass(frozen=True, slots=True)
class GpuDivision:
    """One deployment.

    Attributes:
        mode: `fused` is replicas that share nothing, with tensor parallelism inside a group of several GPUs. The other
            modes are those of `moestro sim`.
        num_groups: groups, all alike; requests are spread over them evenly.
        gpus_per_group: GPUs of a group.
        num_expert_workers: GPUs of a group with experts alone. The others have attention, and, if this is 0, experts.
    """

    mode: SimMode
    num_groups: int
    gpus_per_group: int
    num_expert_workers: int = 0

    @property
    def num_attention_workers(self) -> int:
        """GPUs of a group with attention and KV."""
        return self.gpus_per_group - self.num_expert_workers

    @property
    def num_engines(self) -> int:
        """Schedulers of a group: one for each attention worker, and one for a replica of any size."""
        return 1 if self.mode == "fused" else self.num_attention_workers

    @property
    def num_holders(self) -> int:
        """GPUs of a group that hold experts."""
        return self.num_expert_workers or self.gpus_per_group

    @property
    def tensor_parallel_size(self) -> int:
        """GPUs of an engine."""
        return self.gpus_per_group if self.mode == "fused" else 1

    @property
    def title(self) -> str:
        """Short name: `2 x async 2+2`, `8 replicas`, `2 replicas of 4 GPUs`."""
        if self.mode == "fused":
            replicas = f"{self.num_groups} replica{'s' if self.num_groups > 1 else ''}"
            return replicas if self.gpus_per_group == 1 else f"{replicas} of {self.gpus_per_group} GPUs"
        form = str(self.gpus_per_group)
        if self.num_expert_workers:
            form = f"{self.num_attention_workers}+{self.num_expert_workers}"
        times = f"{self.num_groups} x " if self.num_groups > 1 else ""
        return f"{times}{_NAMES[self.mode]} {form}"


def divisions_of(question: PlanQuestion) -> list[GpuDivision]:
    """List all deployments to try, whether they fit or not."""
    hardware, search = question.settings.hardware, question.settings.search
    found = [
        division
        for size in range(1, hardware.num_gpus + 1)
        if hardware.num_gpus % size == 0
        for division in _of_groups(question, size)
    ]
    return [division for division in found if why_not_served(question, division) is None or not search.served_only]


def why_not_served(question: PlanQuestion, division: GpuDivision) -> str | None:
    """Return why the chosen server does not run a deployment. None means that it does."""
    return question.system.why_not(division.mode, division.tensor_parallel_size)


def _of_groups(question: PlanQuestion, size: int) -> Iterator[GpuDivision]:
    """Yield the deployments in groups of `size` GPUs."""
    hardware, experts = question.settings.hardware, question.network.experts
    number = hardware.num_gpus // size
    if size <= hardware.gpus_per_machine and size & (size - 1) == 0:  # all-reduces stay inside a machine
        yield GpuDivision("fused", number, size)
    if experts is None or size == 1:
        return
    if size <= experts.num_experts:
        modes: tuple[SimMode, ...] = ("ep", "ep-overlap", "async")
        for mode in modes:
            yield GpuDivision(mode, number, size)
    for num_expert_workers in _ratios(size):
        if num_expert_workers <= experts.num_experts:
            yield GpuDivision("afd", number, size, num_expert_workers)
            yield GpuDivision("async", number, size, num_expert_workers)


def _ratios(size: int) -> list[int]:
    """Numbers of expert workers in a group of `size` GPUs."""
    if size <= _MOST_RATIOS:
        return list(range(1, size))
    return sorted({size * part // _MOST_RATIOS for part in range(1, _MOST_RATIOS)})
