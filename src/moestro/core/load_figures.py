"""Load figures of an engine, from the rank that counts them to the router that chooses by them.

Each field carries a `FigureSpec`.
`/metrics`, the log line, the scrape of a Moestro engine, the router's columns and the documentation follow from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, get_type_hints

import msgspec


class FigureKind(StrEnum):
    """Metric types of Prometheus that a figure can have."""

    GAUGE = "gauge"  # the present value
    COUNTER = "counter"  # a total since the process of the rank started


class FigureUnit(StrEnum):
    """Units in which a rank counts."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    FRACTION = "fraction"  # 0 .. 1; several ranks behind one address have the mean
    RATIO = "ratio"  # several ranks behind one address have the mean; of all other units, they have the sum
    TIMES = "times"
    BYTES = "bytes"
    NANOSECONDS = "nanoseconds"  # seconds at `/metrics`


@dataclass(frozen=True, slots=True)
class FigureSpec:
    """Properties of one figure.

    Attributes:
        kind: gauge or counter.
        unit: of the field's value.
        help: one sentence, the help text of `/metrics`.
        metric: name at `/metrics`, without prefix and without `_total`; None means not shown there.
        has_vllm_name: whether vLLM has the same metric, so that `/metrics` shows it with the prefix `vllm:` too.
        is_routed: whether routers keep it in a column of `EngineTable`, which has the name of the field.
        is_from_rank: whether ranks report it. The API server computes the others from the reports of a whole group.
        log_format: the figure in the engine's log line; None means not shown there.
    """

    kind: FigureKind
    unit: FigureUnit
    help: str
    metric: str | None = None
    has_vllm_name: bool = False
    is_routed: bool = False
    is_from_rank: bool = True
    log_format: str | None = None

    def metric_value(self, value: float) -> float:
        """The value that `/metrics` shows, in a base unit of Prometheus."""
        return value / 1e9 if self.unit is FigureUnit.NANOSECONDS else value


_GAUGE, _COUNTER = FigureKind.GAUGE, FigureKind.COUNTER


class PassCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Plans that passed best-effort units, in `preemptive` mode, since the start of the executor.

    Attributes:
        num_passes: plans that ran ahead of best-effort units which had entered earlier and could have run.
        num_withdrawals: times that the device was ordered to return what it had not begun.
        passed_over_ns: time in which any unit was passed over; a stretch is added when it ends.
        num_parked_tokens: tokens of the units that are passed over now.
        max_parked_tokens: the largest `num_parked_tokens` so far.
    """

    num_passes: Annotated[
        int,
        FigureSpec(
            _COUNTER, FigureUnit.TIMES, "Plans of ls requests that ran ahead of be requests.", metric="batch_passes"
        ),
    ] = 0
    num_withdrawals: Annotated[
        int,
        FigureSpec(_COUNTER, FigureUnit.TIMES, "Interruptions of the device within a step.", metric="withdrawals"),
    ] = 0
    num_parked_tokens: Annotated[
        int,
        FigureSpec(_GAUGE, FigureUnit.TOKENS, "Tokens of be requests passed over now.", metric="parked_tokens"),
    ] = 0
    max_parked_tokens: Annotated[
        int,
        FigureSpec(_GAUGE, FigureUnit.TOKENS, "Maximum of parked tokens so far.", metric="parked_tokens_max"),
    ] = 0
    passed_over_ns: Annotated[
        int,
        FigureSpec(
            _COUNTER,
            FigureUnit.NANOSECONDS,
            "Time in which later ls requests ran ahead of runnable be requests.",
            metric="passed_over_seconds",
        ),
    ] = 0


class LockStepCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of a group of engines in `ep` mode, since the start of the group.

    Attributes:
        num_group_steps: steps of the group; the engine takes part in each of them.
        num_idle_steps: those in which it had no tokens and computed experts for the others alone.
        num_group_tokens: tokens of all engines in these steps.
        num_largest_tokens: tokens of the engine that had most, summed over these steps. Times the number of engines and
            over `num_group_tokens`, it is the mean imbalance of attention.
    """

    num_group_steps: Annotated[
        int,
        FigureSpec(_COUNTER, FigureUnit.TIMES, "Steps of the engine's group in mode ep.", metric="group_steps"),
    ] = 0
    num_idle_steps: Annotated[
        int,
        FigureSpec(
            _COUNTER,
            FigureUnit.TIMES,
            "Steps of the group to which the engine brought no tokens.",
            metric="group_idle_steps",
        ),
    ] = 0
    num_group_tokens: Annotated[
        int,
        FigureSpec(_COUNTER, FigureUnit.TOKENS, "Tokens of all engines in steps of the group.", metric="group_tokens"),
    ] = 0
    num_largest_tokens: Annotated[
        int,
        FigureSpec(
            _COUNTER,
            FigureUnit.TOKENS,
            "Tokens of the busiest engine in each step of the group.",
            metric="group_largest_tokens",
        ),
    ] = 0


class PaceCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Items of a paced device, whose durations are modelled, since its process started.

    Attributes:
        dilation: factor on all modelled durations.
        num_items: items whose end was taken in.
        item_ns: their durations, dilated.
        late_ns: times from the modelled end of each item until the process took it in. Over `item_ns`, it is the share
            by which the machine of the process distorts the figures.
        wait_ns: part of `item_ns` in which the device waits for the others of its group, in `ep` mode.
        num_messages: messages of other workers that a modelled link brought, in `async` mode.
        message_late_ns: times from the modelled arrival of each message until the process took it in.
    """

    dilation: Annotated[
        float,
        FigureSpec(
            _GAUGE, FigureUnit.RATIO, "Factor on modelled durations; 0 without a paced device.", metric="pace_dilation"
        ),
    ] = 0.0
    num_items: Annotated[
        int, FigureSpec(_COUNTER, FigureUnit.TIMES, "Items of a paced device.", metric="paced_items")
    ] = 0
    item_ns: Annotated[
        int,
        FigureSpec(
            _COUNTER,
            FigureUnit.NANOSECONDS,
            "Durations of the items of a paced device, dilated.",
            metric="paced_item_seconds",
        ),
    ] = 0
    late_ns: Annotated[
        int,
        FigureSpec(
            _COUNTER,
            FigureUnit.NANOSECONDS,
            "Times by which ends of paced items were taken in late.",
            metric="paced_late_seconds",
        ),
    ] = 0
    wait_ns: Annotated[
        int,
        FigureSpec(
            _COUNTER,
            FigureUnit.NANOSECONDS,
            "Part of the durations of paced steps in which the device waits for its group, in mode ep.",
            metric="paced_wait_seconds",
        ),
    ] = 0
    num_messages: Annotated[
        int, FigureSpec(_COUNTER, FigureUnit.TIMES, "Messages that a modelled link brought.", metric="paced_messages")
    ] = 0
    message_late_ns: Annotated[
        int,
        FigureSpec(
            _COUNTER,
            FigureUnit.NANOSECONDS,
            "Times by which messages of modelled links were taken in late.",
            metric="paced_messages_late_seconds",
        ),
    ] = 0


class LoadFigures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A report of one engine's load; None means that this report does not contain the figure.

    Attributes:
        num_running, num_waiting: requests with, without KV blocks.
        kv_usage: fraction of KV blocks held by sequences, 0 .. 1.
        queued_prefill_tokens: prompt tokens yet to be computed, of waiting and of running requests, without those that
            preempted requests keep in host memory.
        num_tokens: context tokens of waiting and running requests (Gimbal's RunningLoad).
        expert_pressure: load of the workers that compute the experts of the engine's tokens, over that of the mean
            worker, as `core.expert_pressure` defines it. None where each engine holds the whole network.
        expert_local_share: fraction of the visits of the engine's tokens that experts on its own device compute.
        num_preemptions: times that a request gave up its KV.
        num_queried_tokens, num_hit_tokens: prompt tokens looked up, and found, in the prefix cache on the device.
        num_host_queried_tokens, num_host_hit_tokens: of the others, those looked up in host memory, and copied from it.
        host_usage: fraction of host memory for KV in use, 0 .. 1.
        num_stored_bytes, num_loaded_bytes: KV copied to host memory, and back from it.
        num_failed_copies: steps that were computed again because their copies failed.
        num_kept_tokens: tokens whose KV preempted requests left in host memory.
        num_restored_tokens: tokens whose KV was copied back.
        num_dropped_rows: computed units without use, because their requests had ended or were aborted meanwhile.
        num_steps_ahead: steps launched before the tokens of the step in flight were on the host.
        pass_counts: plans that passed others, in `preemptive` mode.
        lock_step: steps of the engine's group, in `ep` mode.
        pace: items of a paced device; None in `async` mode, where workers report it.
    """

    num_running: Annotated[
        int | None,
        FigureSpec(
            _GAUGE,
            FigureUnit.REQUESTS,
            "Requests that hold KV.",
            metric="num_requests_running",
            has_vllm_name=True,
            is_routed=True,
            log_format="running {}",
        ),
    ] = None
    num_waiting: Annotated[
        int | None,
        FigureSpec(
            _GAUGE,
            FigureUnit.REQUESTS,
            "Requests that wait for KV.",
            metric="num_requests_waiting",
            has_vllm_name=True,
            is_routed=True,
            log_format="waiting {}",
        ),
    ] = None
    kv_usage: Annotated[
        float | None,
        FigureSpec(
            _GAUGE,
            FigureUnit.FRACTION,
            "Fraction of KV blocks held by requests, 0 to 1.",
            metric="kv_cache_usage_perc",
            has_vllm_name=True,
            is_routed=True,
            log_format="KV {:.1%}",
        ),
    ] = None
    queued_prefill_tokens: Annotated[
        int | None,
        FigureSpec(
            _GAUGE,
            FigureUnit.TOKENS,
            "Prompt tokens yet to be computed.",
            metric="queued_prefill_tokens",
            is_routed=True,
        ),
    ] = None
    num_tokens: Annotated[
        int | None,
        FigureSpec(
            _GAUGE,
            FigureUnit.TOKENS,
            "Context tokens of waiting and running requests.",
            metric="context_tokens",
            is_routed=True,
        ),
    ] = None
    expert_pressure: Annotated[
        float | None,
        FigureSpec(
            _GAUGE,
            FigureUnit.RATIO,
            "Load of the workers that compute the experts of the engine's tokens, over the mean worker's; with queue"
            " ages in mode async.",
            metric="expert_pressure",
            is_routed=True,
            is_from_rank=False,
        ),
    ] = None
    expert_local_share: Annotated[
        float | None,
        FigureSpec(
            _GAUGE,
            FigureUnit.FRACTION,
            "Fraction of the visits of the engine's tokens that experts on its own device compute.",
            metric="expert_local_share",
            is_routed=True,
            is_from_rank=False,
        ),
    ] = None
    num_preemptions: Annotated[
        int | None,
        FigureSpec(
            _COUNTER,
            FigureUnit.TIMES,
            "Preemptions of requests.",
            metric="num_preemptions",
            has_vllm_name=True,
        ),
    ] = None
    num_queried_tokens: Annotated[
        int | None,
        FigureSpec(
            _COUNTER,
            FigureUnit.TOKENS,
            "Prompt tokens looked up in the prefix cache.",
            metric="prefix_cache_queries",
            has_vllm_name=True,
        ),
    ] = None
    num_hit_tokens: Annotated[
        int | None,
        FigureSpec(
            _COUNTER,
            FigureUnit.TOKENS,
            "Prompt tokens found in the prefix cache.",
            metric="prefix_cache_hits",
            has_vllm_name=True,
        ),
    ] = None
    num_host_queried_tokens: Annotated[
        int | None,
        FigureSpec(
            _COUNTER,
            FigureUnit.TOKENS,
            "Prompt tokens looked up in host memory, because the prefix cache on the device had them not.",
            metric="external_prefix_cache_queries",
            has_vllm_name=True,
        ),
    ] = None
    num_host_hit_tokens: Annotated[
        int | None,
        FigureSpec(
            _COUNTER,
            FigureUnit.TOKENS,
            "Prompt tokens whose KV was copied from host memory.",
            metric="external_prefix_cache_hits",
            has_vllm_name=True,
        ),
    ] = None
    host_usage: Annotated[
        float | None,
        FigureSpec(
            _GAUGE,
            FigureUnit.FRACTION,
            "Fraction of host memory for KV in use (0 .. 1).",
            metric="kv_offload_cpu_cache_usage_perc",
            has_vllm_name=True,
        ),
    ] = None
    num_stored_bytes: Annotated[
        int | None,
        FigureSpec(
            _COUNTER,
            FigureUnit.BYTES,
            "KV copied to host memory.",
            metric="kv_offload_store_bytes",
            has_vllm_name=True,
        ),
    ] = None
    num_loaded_bytes: Annotated[
        int | None,
        FigureSpec(
            _COUNTER,
            FigureUnit.BYTES,
            "KV copied back from host memory.",
            metric="kv_offload_load_bytes",
            has_vllm_name=True,
        ),
    ] = None
    num_failed_copies: Annotated[
        int | None,
        FigureSpec(
            _COUNTER,
            FigureUnit.TIMES,
            "Steps computed again because a copy of KV to or from host memory failed.",
            metric="kv_copies_failed",
        ),
    ] = None
    num_kept_tokens: Annotated[
        int | None,
        FigureSpec(
            _COUNTER,
            FigureUnit.TOKENS,
            "Tokens whose KV preempted requests kept in host memory.",
            metric="kv_kept_tokens",
        ),
    ] = None
    num_restored_tokens: Annotated[
        int | None,
        FigureSpec(
            _COUNTER,
            FigureUnit.TOKENS,
            "Tokens whose KV was copied back from host memory.",
            metric="kv_restored_tokens",
        ),
    ] = None
    num_dropped_rows: Annotated[
        int | None,
        FigureSpec(
            _COUNTER,
            FigureUnit.TIMES,
            "Units of steps computed for requests that had ended or were aborted meanwhile.",
            metric="dropped_rows",
        ),
    ] = None
    num_steps_ahead: Annotated[
        int | None,
        FigureSpec(
            _COUNTER,
            FigureUnit.TIMES,
            "Steps launched before the tokens of the step in flight were on the host.",
            metric="steps_ahead",
        ),
    ] = None
    pass_counts: PassCounts | None = None
    lock_step: LockStepCounts | None = None
    pace: PaceCounts | None = None


def _specs_of(struct: type[msgspec.Struct]) -> dict[str, FigureSpec]:
    hints: dict[str, Any] = get_type_hints(struct, include_extras=True)
    return {
        name: spec
        for name, hint in hints.items()
        for spec in getattr(hint, "__metadata__", ())
        if isinstance(spec, FigureSpec)
    }


_OWN_SPECS = _specs_of(LoadFigures)
# Figures of one mode alone, by the field of `LoadFigures` that holds them.
_PARTS: Mapping[str, type[PassCounts | LockStepCounts | PaceCounts]] = {
    "pass_counts": PassCounts,
    "lock_step": LockStepCounts,
    "pace": PaceCounts,
}
_PART_SPECS = {part: _specs_of(struct) for part, struct in _PARTS.items()}

# Every figure, by the name of its field.
FIGURES: Mapping[str, FigureSpec] = _OWN_SPECS | {
    name: spec for specs in _PART_SPECS.values() for name, spec in specs.items()
}
# Names of the figures that routers keep.
ROUTED_FIGURES = tuple(name for name, spec in FIGURES.items() if spec.is_routed)
# The report of a rank that has no requests and has had none.
IDLE = msgspec.convert(
    {name: 0 for name, spec in _OWN_SPECS.items() if spec.is_from_rank} | {"pass_counts": {}}, LoadFigures
)


def figure_values(load: LoadFigures) -> dict[str, float]:
    """All figures of `load` by name, those of single modes among them; 0 where the report has none."""
    values: dict[str, float] = {name: getattr(load, name) or 0 for name in _OWN_SPECS}
    for part, specs in _PART_SPECS.items():
        counts = getattr(load, part)
        values |= {name: 0 if counts is None else getattr(counts, name) for name in specs}
    return values
