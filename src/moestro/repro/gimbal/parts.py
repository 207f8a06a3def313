"""The parts of Gimbal's experiment. Each is a file, so that a run can be stopped and go on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from moestro.cost.popularity import PopularityForm
from moestro.repro.gimbal.beds import EpBed
from moestro.repro.gimbal.loads import CHATS, USERS, Tenants
from moestro.repro.gimbal.systems import (
    DPLB,
    EDR,
    GIMBAL_V1,
    MOESTRO,
    PLACEMENTS,
    REPEATED,
    STACK,
    TABLE,
    V1_NO_USERS,
    VLLM,
    VLLM_LEAST,
)
from moestro.workload.length_shapes import SHAPES, Shape
from moestro.workload.session_shapes import SessionShape

RATES, HIGH = (1.0, 1.2, 1.4), 1.4  # requests a second (section V-B1)
SEEDS = (0, 1, 2)  # the paper repeats its runs at 1.4 requests a second three times
THETA_AGE_S = 5.0
P99_GOAL_MS = 4_900.0  # "our environment consistently has a P99 TTFT" below this at 1.4 requests a second (V-A2)

Kind = Literal["rates", "near_age", "kv", "skew", "prefix", "tenants"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GimbalPart:
    """One load of the experiment.

    Attributes:
        name: the load.
        kind: what the part is: latencies at rates; at the rate at which vLLM's P99 TTFT is near the age threshold; over
            KV blocks; over skews; prefix hits; tenants with experts of their own.
        bed: testbed.
        shape: shape of the lengths.
        num_requests: requests of a run.
        rates: requests a second.
        systems: systems, the baseline first.
        repeated: systems that the last rate runs under further seeds.
        seeds: seeds of requests, arrivals, popularity and gate; the first serves all systems and rates.
        kv_blocks: KV blocks of a rank, in a part `kv`.
        skews: exponents of Zipf, in a part `skew`.
        users: users of a part `prefix`.
        num_runs: runs of a part `prefix`.
        tenants: tenants of a part `tenants`.
    """

    name: str
    kind: Kind = "rates"
    bed: EpBed = EpBed()
    shape: Shape = "random"
    num_requests: int = 1000
    rates: tuple[float, ...] = RATES
    systems: tuple[str, ...] = TABLE
    repeated: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    kv_blocks: tuple[int, ...] = ()
    skews: tuple[float, ...] = ()
    users: SessionShape | None = None
    num_runs: int = 5
    tenants: Tenants = field(default_factory=Tenants)


# Eight GPUs: users stay on their rank, and each of four domains has its own hot experts.
_SOURCES = EpBed(
    num_ranks=8, popularity=PopularityForm(hot_ids="permuted", num_domains=4), num_spares=2, interval_steps=300
)
_PREFIX_SYSTEMS = (VLLM, VLLM_LEAST, GIMBAL_V1, V1_NO_USERS, MOESTRO)


def whole(num_requests: int) -> tuple[GimbalPart, ...]:
    """Return all parts, with so many requests in each run of the latency tables."""
    parts = [
        GimbalPart(
            name=f"shape_{shape}", shape=shape, num_requests=num_requests, repeated=REPEATED, seeds=SEEDS
        )
        for shape in SHAPES
    ]
    parts += [
        GimbalPart(
            name=f"near_age_{shape}", kind="near_age", shape=shape, num_requests=num_requests, rates=(),
            bed=EpBed(interval_steps=interval_steps),
        )
        for shape, interval_steps in (("random", 300), ("average", 300))
    ]  # fmt: skip
    parts.append(
        GimbalPart(
            name="kv_memory", kind="kv", shape="central", num_requests=num_requests, rates=(HIGH, 8.0),
            systems=(VLLM, DPLB, GIMBAL_V1), kv_blocks=(320, 512, 1024, 2048, 24_000),
        )
    )  # fmt: skip
    parts.append(
        GimbalPart(
            name="skew", kind="skew", shape="average", num_requests=num_requests, rates=(4.0,),
            systems=(VLLM, EDR, "place:eplb", "place:gimbal_v2", "place:moestro"), skews=(0.0, 0.3, 0.6, 1.0),
            bed=EpBed(interval_steps=500),
        )
    )  # fmt: skip
    parts += [
        GimbalPart(
            name=f"prefix_{name}", kind="prefix", users=users, num_requests=10_000, rates=(8.0,),
            systems=_PREFIX_SYSTEMS, bed=EpBed(has_cache=True),
        )
        for name, users in (("users", USERS), ("chats", CHATS))
    ]  # fmt: skip
    for name, machines, shuffled in (("", 1, False), ("_two_machines", 2, False), ("_shuffled", 2, True)):
        parts.append(
            GimbalPart(
                name=f"sources{name}", kind="tenants", num_requests=num_requests, rates=(12.0,), shape="average",
                systems=PLACEMENTS, bed=replace(_SOURCES, num_machines=machines),
                tenants=Tenants(is_shuffled=shuffled),
            )
        )  # fmt: skip
    parts.append(
        GimbalPart(
            name="stack", kind="tenants", num_requests=num_requests, rates=(12.0,), shape="two-end", systems=STACK,
            bed=_SOURCES, tenants=Tenants(drifts=True, users_per_domain=8),
        )
    )  # fmt: skip
    return tuple(parts)


QUICK = (
    GimbalPart(
        name="shape_random", num_requests=24, rates=(HIGH,), bed=EpBed(interval_steps=200),
        systems=(VLLM, DPLB, EDR, GIMBAL_V1, MOESTRO),
    ),
    GimbalPart(
        name="kv_memory", kind="kv", shape="central", num_requests=24, rates=(8.0,), systems=(VLLM, DPLB),
        kv_blocks=(320,),
    ),
    GimbalPart(
        name="prefix_users", kind="prefix", users=USERS, num_requests=400, rates=(8.0,), num_runs=2,
        systems=(VLLM, GIMBAL_V1, V1_NO_USERS), bed=EpBed(has_cache=True),
    ),
)  # fmt: skip
