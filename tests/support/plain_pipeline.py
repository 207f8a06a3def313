"""The pipeline of micro-batches, written down task by task: the oracle of `sim.baselines.pipelined`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

Task = tuple  # (kind, layer, part), and the worker of attention and experts


@dataclass(frozen=True)
class PlainPipeline:
    """Tasks of a step, in the order in which each worker and each link does its own."""

    times: object
    num_ranks: int
    is_colocated: bool

    @cached_property
    def holders(self) -> range:
        """Workers with experts."""
        return range(0 if self.is_colocated else self.num_ranks, self.times.experts_ns.shape[1])

    def tasks(self) -> dict[object, list[Task]]:
        """Tasks of each worker and link, in order."""
        lists: dict[object, list[Task]] = {}
        num_parts, num_layers = self.times.exchange_ns.shape
        back = "out" if self.is_colocated else "back"
        for layer in range(num_layers + 1):
            for rank in range(self.num_ranks):
                lists.setdefault(rank, []).extend(("attention", layer, part, rank) for part in range(num_parts))
            if layer < num_layers:
                for worker in self.holders:
                    lists.setdefault(worker, []).extend(("experts", layer, part, worker) for part in range(num_parts))
                lists.setdefault("out", []).extend(("dispatch", layer, part) for part in range(num_parts))
                lists.setdefault(back, []).extend(("combine", layer, part) for part in range(num_parts))
        return lists

    def needs(self, task: Task) -> list[Task]:
        """Tasks that end before `task` begins, apart from those before it in its list."""
        kind, layer, part = task[:3]
        if kind == "attention":
            return [("combine", layer - 1, part)] if layer else []
        if kind == "dispatch":
            return [("attention", layer, part, rank) for rank in range(self.num_ranks)]
        if kind == "experts":
            return [("dispatch", layer, part)]
        return [("experts", layer, part, worker) for worker in self.holders]

    def takes(self, task: Task) -> int:
        """Time of a task, ns."""
        kind, layer, part = task[:3]
        if kind == "attention":
            return int(self.times.attention_ns[part, task[3], layer])
        if kind == "experts":
            return int(self.times.experts_ns[part, task[3], layer])
        return int(self.times.exchange_ns[part, layer])


def plain_pipeline_ns(times, num_ranks: int, is_colocated: bool) -> int:
    """Time of a step: a task begins when its worker or link is free and all that it needs has ended."""
    pipeline = PlainPipeline(times, num_ranks, is_colocated)
    lists, ended = pipeline.tasks(), {}
    free = dict.fromkeys(lists, 0)
    while any(lists.values()):
        for owner, tasks in lists.items():
            while tasks and all(need in ended for need in pipeline.needs(tasks[0])):
                task = tasks.pop(0)
                begins = max([free[owner], *(ended[need] for need in pipeline.needs(task))])
                ended[task] = free[owner] = begins + pipeline.takes(task)
    return max(ended.values()) + times.overhead_ns
