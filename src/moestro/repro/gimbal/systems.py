"""The systems that are compared: a policy for each level, and how weights move."""

from __future__ import annotations

from dataclasses import dataclass, replace

# A step of two ranks takes 10 to 100 ms. 64 MiB cross NVLink in 0.5 ms, so moving lengthens a step by 5 % at most.
BUDGET_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A policy for each level.

    Attributes:
        about: the system in a line.
        route: routing policy (level 1).
        order: order of each rank's queue (level 2).
        place: placement policy (level 4).
        bytes_per_step: weights that a device receives between two steps. None means that one step waits for all.
        has_payback_gate: whether a plan that does not pay within the interval is dropped, as `moestro serve` does; vLLM
            and Gimbal have no such gate.
        knows_users: whether requests name their users.
    """

    about: str
    route: str = "round_robin"
    order: str = "fcfs"
    place: str = "static"
    bytes_per_step: int | None = None
    has_payback_gate: bool = False
    knows_users: bool = True


VLLM, VLLM_LEAST, VLLM_EPLB = "vllm", "vllm_least", "vllm_eplb"
DPLB, SJFS, EDR = "dplb", "sjfs", "edr"
GIMBAL_V1, GIMBAL_V2, MOESTRO = "gimbal_v1", "gimbal_v2", "moestro"
V1_NO_USERS = "gimbal_v1_no_users"
ROUTE, ORDER, PLACE = "moestro_route", "moestro_order", "moestro_place"

SYSTEMS: dict[str, System] = {
    VLLM: System(about="vLLM as the paper describes it: round robin, first come first served, experts in order"),
    VLLM_LEAST: System(about="vLLM as its code has it: its own balancer of waiting and running", route="vllm-0.26"),
    VLLM_EPLB: System(about="vllm_least with EPLB, all layers at once", route="vllm-0.26", place="eplb"),
    DPLB: System(about="vLLM with Algorithm 1 of Gimbal v1", route="gimbal-v1"),
    SJFS: System(about="vLLM with Algorithm 2 of Gimbal v1", order="sjf"),
    EDR: System(about="vLLM with Algorithm 3 of Gimbal v1", place="gimbal_v1"),
    GIMBAL_V1: System(about="Gimbal v1: Algorithms 1 to 3", route="gimbal-v1", order="sjf", place="gimbal_v1"),
    GIMBAL_V2: System(
        about="Gimbal v2, our reconstruction from its abstract",
        route="gimbal-v2", order="prefill_aware", place="gimbal_v2",
    ),
    MOESTRO: System(
        about="Moestro: its own routing and placement, least uncached prefill first, weights in small parts",
        route="moestro", order="prefill_aware", place="moestro", bytes_per_step=BUDGET_BYTES, has_payback_gate=True,
    ),
    ROUTE: System(about="vllm_eplb with Moestro's routing alone", route="moestro", place="eplb"),
    ORDER: System(about="vllm_eplb with Moestro's order alone", route="vllm-0.26", order="prefill_aware", place="eplb"),
    PLACE: System(
        about="vllm_eplb with Moestro's placement alone, weights in small parts",
        route="vllm-0.26", place="moestro", bytes_per_step=BUDGET_BYTES, has_payback_gate=True,
    ),
}  # fmt: skip
SYSTEMS[V1_NO_USERS] = replace(
    SYSTEMS[GIMBAL_V1], about="Gimbal v1 without user affinity: requests name no users", knows_users=False
)
_LOADS = ("static", "eplb", "gimbal_v1", "gimbal_v2", "moestro")
# Placement alone, under the router of the part: `place:POLICY`.
for _name in _LOADS:
    SYSTEMS[f"place:{_name}"] = System(
        about=f"users stay on their rank; placement by {_name}",
        route="user_affinity",
        place=_name,
        bytes_per_step=BUDGET_BYTES if _name == "moestro" else None,
        has_payback_gate=_name == "moestro",
    )

TABLE = (VLLM, VLLM_LEAST, DPLB, SJFS, EDR, GIMBAL_V1, GIMBAL_V2, MOESTRO)  # of the latency tables
REPEATED = (VLLM, GIMBAL_V1, GIMBAL_V2, MOESTRO)  # the paper repeats the whole systems under three seeds
RIVALS = (VLLM, VLLM_LEAST, GIMBAL_V1, GIMBAL_V2, MOESTRO)  # whole systems on equal seeds
PLACEMENTS = tuple(f"place:{name}" for name in _LOADS)
STACK = (VLLM_EPLB, ROUTE, ORDER, PLACE, MOESTRO)
