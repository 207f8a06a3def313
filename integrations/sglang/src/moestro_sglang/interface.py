"""Checks the parts of SGLang that the hooks rely on, because all of them are private names."""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
import pkgutil
from collections.abc import Iterable
from typing import Any

TESTED = ("0.5.23",)  # versions of SGLang that the contract tests ran with

_MANAGERS, _STATS = "sglang.srt.managers", "sglang.srt.observability.req_time_stats"
INIT_ORDER = f"{_MANAGERS}.schedule_policy.SchedulePolicy.__init__"
CALC_PRIORITY = f"{_MANAGERS}.schedule_policy.SchedulePolicy.calc_priority"
API_STATE = f"{_STATS}.APIServerReqTimeStats.__getstate__"
DP_STATE = f"{_STATS}.DPControllerReqTimeStats.__getstate__"
REBALANCE = "sglang.srt.eplb.eplb_algorithms.rebalance_experts"
INIT_BUDGET = f"{_MANAGERS}.data_parallel_controller.DPBudget.__init__"
UPDATE_BUDGET = f"{_MANAGERS}.data_parallel_controller.DPBudget.update_budget"
CHOOSE_RANK = f"{_MANAGERS}.data_parallel_controller.DataParallelController.total_tokens_scheduler"
READ_METHOD = f"{_MANAGERS}.data_parallel_controller.LoadBalanceMethod.from_str"

# Arguments of each target, as a caller sees them.
ARGUMENTS = {
    INIT_ORDER: (
        "self", "policy", "tree_cache", "enable_hierarchical_cache", "enable_priority_scheduling",
        "schedule_low_priority_values_first",
    ),
    CALC_PRIORITY: ("self", "waiting_queue", "running_batch", "processed_tokens"),
    API_STATE: ("self",),
    DP_STATE: ("self",),
    REBALANCE: (
        "tokens_per_expert", "num_physical_experts", "num_local_physical_experts", "num_groups", "num_nodes",
        "algorithm",
    ),
    INIT_BUDGET: ("self", "num_dp_ranks"),
    UPDATE_BUDGET: ("self", "loads"),
    CHOOSE_RANK: ("self", "req"),
    READ_METHOD: ("method",),
}  # fmt: skip
# Further names that the hooks of a target use.
NAMES = {
    CALC_PRIORITY: (f"{_MANAGERS}.schedule_policy.match_kv_cache", f"{_STATS}.SchedulerReqTimeStats"),
    REBALANCE: (
        "sglang.srt.eplb.expert_location.get_global_expert_location_metadata",
        "sglang.srt.runtime_context.get_exec",
    ),
    CHOOSE_RANK: (
        f"{_MANAGERS}.data_parallel_controller.sock_send",
        f"{_MANAGERS}.data_parallel_controller.DataParallelController.maybe_external_dp_rank_routing",
    ),
}
SNAPSHOT = f"{_MANAGERS}.load_snapshot.LoadSnapshot"
SNAPSHOT_FIELDS = frozenset(
    {
        "timestamp", "dp_rank", "num_running_reqs", "num_waiting_reqs", "num_waiting_uncached_tokens",
        "num_total_tokens", "max_total_num_tokens", "token_usage",
    }
)  # fmt: skip

_logger = logging.getLogger(__name__)


class SglangInterfaceError(ImportError):
    """SGLang is missing, or has moved something that a hook needs. The text is one line with the way out."""


def check_interface(targets: Iterable[str]) -> None:
    """Check the targets of hooks, and what else their hooks use.

    Raises:
        SglangInterfaceError: Something is missing, or has other arguments or fields.
    """
    for target in targets:
        found = tuple(inspect.signature(_named(target)).parameters)
        if found != ARGUMENTS[target]:
            raise _moved(target, f"takes ({', '.join(found)}) and not ({', '.join(ARGUMENTS[target])})")
        for name in NAMES.get(target, ()):
            _named(name)
        if target == UPDATE_BUDGET:
            missing = sorted(SNAPSHOT_FIELDS - set(_named(SNAPSHOT).__struct_fields__))
            if missing:
                raise _moved(SNAPSHOT, f"has no {', '.join(missing)}")
    version = sglang_version() or "of unknown version"
    if not version.startswith(TESTED):
        _logger.warning(
            "moestro-sglang was tested with SGLang %s and not with %s; its interface looks the same",
            " and ".join(TESTED),
            version,
        )


def sglang_version() -> str | None:
    """Return the version of the installed SGLang; None means that there is none."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def _named(name: str) -> Any:
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError) as error:
        if sglang_version() is None:
            raise SglangInterfaceError(f"it needs SGLang, which is not installed: {_advice()}") from error
        raise _moved(name, f"cannot be imported ({error})") from error


def _moved(what: str, how: str) -> SglangInterfaceError:
    return SglangInterfaceError(
        f"it cannot work with SGLang {sglang_version() or 'of unknown version'}: {what} {how}; {_advice()}"
    )


def _advice() -> str:
    return f"install SGLang {TESTED[-1]}, or a later moestro-sglang, or unset the variables MOESTRO_SGLANG_*"
