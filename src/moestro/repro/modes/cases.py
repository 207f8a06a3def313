"""The cases of the map: a testbed, and one change of it at a time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from moestro.repro.amoe.loads import LENGTHS, LengthRanges
from moestro.repro.amoe.systems import ASYNC, COLOCATED, EP, OVERLAP, PING_PONG_NAME, REPLICAS
from moestro.repro.modes.beds import UnevenBed

SYSTEMS = (COLOCATED, ASYNC, EP, OVERLAP, PING_PONG_NAME, REPLICAS)
OURS = (COLOCATED, ASYNC)

# Mixtral 8x7B on two AWS machines with half of their GPUs: AMoE's GPUs and network, and a network with a public gate.
# One expert of all layers has 11.3 GB, so that a GPU holds two of them at most.
BASE = UnevenBed(
    network="mixtral-8x7b", gpu="a100-40g", num_gpus=8, gpus_per_machine=4, popularity="permuted", prices="kernels"
)
_ONE_MACHINE = replace(BASE, gpus_per_machine=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class MapCase:
    """One row of the map.

    Attributes:
        name: the load.
        axis: what is varied, and `about` how.
        bed: testbed.
        lengths: lengths of prompts, which are in the cache at the start, and of answers.
        ladder: constant numbers of requests in progress, ascending.
        passes: tokens of each request, in the mean, before a run is observed and while it is.
        num_sensitive: latency-sensitive requests in each run, whose ITL is bounded; the others are best effort. None
            means that all are.
        computes_prompts: whether prompts are computed beside decodes.
        step_policy: step policy of `async`; "" means that of the systems.
        seeds: seeds of the popularity, the gate, the requests and the jitter.
    """

    name: str
    axis: str
    about: str
    bed: UnevenBed
    lengths: LengthRanges = field(default_factory=lambda: LENGTHS["medium"])
    ladder: tuple[int, ...] = (512, 2048, 8192)
    passes: tuple[int, int] = (4, 6)
    num_sensitive: int | None = None
    computes_prompts: bool = False
    step_policy: str = ""
    seeds: tuple[int, ...] = (0,)


_OWN_FIELDS = ("lengths", "seeds", "num_sensitive", "computes_prompts", "step_policy")


def _case(axis: str, about: str, bed: UnevenBed = BASE, **changes: Any) -> MapCase:
    others = {name: changes.pop(name) for name in _OWN_FIELDS if name in changes}
    name = f"{axis}_{about}".replace(" ", "_").replace("%", "").replace(",", "")
    return MapCase(name=name, axis=axis, about=about, bed=replace(bed, **changes), **others)


CASES = (
    _case("base", "permuted", seeds=(0, 1, 2, 3, 4)),
    _case("skew", "none", popularity="uniform", seeds=(0, 1)),
    _case("skew", "half", skew=0.27, seeds=(0, 1)),
    _case("skew", "same in all layers", popularity="same"),
    _case("copies", "one spare slot", num_spares=1, seeds=(0, 1, 2, 3, 4)),
    _case("copies", "one spare slot, stale plan", num_spares=1, is_plan_stale=True),
    _case("network", "one machine, NVSwitch", _ONE_MACHINE),
    _case("network", "Ethernet", across="ethernet-100g"),
    _case("network", "latency 100 us more", added_latency_ns=100_000),
    _case("network", "latency 500 us more", added_latency_ns=500_000),
    _case("straggler", "one GPU 2 x", slow=(2.0,)),
    _case("straggler", "one GPU 2 x, no skew, spare slot", slow=(2.0,), popularity="uniform", num_spares=1),
    _case("unequal", "four of eight GPUs 1.5 x", slow=(1.5,) * 4),
    _case("jitter", "30 %", variation=0.3, seeds=(0, 1, 2, 3, 4)),
    _case("jitter", "60 %, no skew", variation=0.6, popularity="uniform"),
    _case("host", "a quarter", host_factor=0.25),
    _case("host", "4 x", host_factor=4.0),
    _case(
        "experts",
        "top-1 of 16 on 16 GPUs",
        network="mixtral-16x7b-mqa-top1",
        num_gpus=16,
        gpus_per_machine=8,
        seeds=(0, 1, 2, 3, 4),
    ),
    replace(
        _case("experts", "8 of 128", _ONE_MACHINE, network="qwen3-30b-a3b"), ladder=(512,), passes=(2, 2)
    ),  # few requests, because each of many small items takes the simulator as long as a large one
    _case("memory", "80 GB, one machine", _ONE_MACHINE, gpu="a100-80g"),
    _case("lengths", "contexts of 1,000 tokens", lengths=LengthRanges(prompt=(500, 1500), output=(50, 250))),
    *(
        replace(
            _case("classes", f"{num} chats, the rest best effort", num_sensitive=num, step_policy="priority"),
            ladder=(512, 2048),
            passes=(2, 3),
        )
        for num in (128, 256)
    ),  # less work, because the chats alone make small items
    _case("prompts", "computed", computes_prompts=True),
)
QUICK = (replace(CASES[0], ladder=(512, 2048), passes=(1, 1), seeds=(0,)),)
