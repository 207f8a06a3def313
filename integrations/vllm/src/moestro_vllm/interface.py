"""Checks the parts of vLLM's interface that this package uses, because vLLM does not call them public."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
from collections.abc import Iterable
from typing import Any

TESTED = ("0.32", "0.33")  # versions of vLLM that the contract tests ran with

QUEUE_METHODS = frozenset(
    {
        "add_request",
        "pop_request",
        "peek_request",
        "prepend_request",
        "prepend_requests",
        "remove_request",
        "remove_requests",
        "__bool__",
        "__len__",
        "__iter__",
    }
)
SCHEDULER_METHODS = frozenset({"schedule", "_free_request"})  # the ones that our scheduler extends
# What a scheduler reads of itself once it was made: `attribute`, or `attribute.attribute`.
SCHEDULER_ATTRIBUTES = (
    "waiting",
    "requests",
    "vllm_config.additional_config",
    "scheduler_config.policy",
    "kv_cache_manager.enable_caching",
    "kv_cache_manager.coordinator.find_longest_cache_hit",
)
EPLB_ARGUMENTS = ("weight", "num_replicas", "num_groups", "num_nodes", "num_ranks", "old_global_expert_indices")
EPLB_STATE_METHODS = ("build_initial_global_physical_to_logical_map", "step")
EPLB_KEY = "default"

_QUEUE = "vllm.v1.core.sched.request_queue"
_SCHEDULER = "vllm.v1.core.sched.async_scheduler"
_EPLB = "vllm.distributed.eplb.policy"
_EPLB_STATE = "vllm.distributed.eplb.eplb_state"
_logger = logging.getLogger(__name__)


class VllmInterfaceError(ImportError):
    """vLLM is missing, or has moved something that this package needs. The text is one line with the way out."""


def check_scheduler_interface() -> None:
    """Check the classes that a scheduler class extends.

    Raises:
        VllmInterfaceError: Something is missing or has other methods.
    """
    queue = _named(_QUEUE, "RequestQueue")
    wanted = frozenset(getattr(queue, "__abstractmethods__", ()))
    if wanted != QUEUE_METHODS:
        raise _moved(f"{_QUEUE}.RequestQueue", _difference(QUEUE_METHODS, wanted))
    scheduler = _named(_SCHEDULER, "AsyncScheduler")
    missing = [name for name in sorted(SCHEDULER_METHODS) if not callable(getattr(scheduler, name, None))]
    if missing:
        raise _moved(f"{_SCHEDULER}.AsyncScheduler", f"has no {', '.join(missing)}")
    _warn_if_untested()


def check_scheduler(scheduler: object) -> None:
    """Check the attributes of a scheduler of vLLM that was just made.

    Raises:
        VllmInterfaceError: An attribute is missing.
    """
    for path in SCHEDULER_ATTRIBUTES:
        found: Any = scheduler
        for name in path.split("."):
            if not hasattr(found, name):
                raise _moved(f"{_SCHEDULER}.AsyncScheduler", f"has no {path}")
            found = getattr(found, name)


def check_eplb_interface() -> None:
    """Check the table of placement policies, the arguments of one, and the balancer's state.

    Raises:
        VllmInterfaceError: The table has other keys, a policy takes other arguments, or the state lacks something.
    """
    policies = _named(_EPLB, "EPLB_POLICIES")
    if EPLB_KEY not in policies:
        raise _moved(f"{_EPLB}.EPLB_POLICIES", f"has no {EPLB_KEY!r}, only {sorted(policies)}")
    policy = _named(_EPLB, "AbstractEplbPolicy")
    found: tuple[str, ...] = ("context",)
    if not hasattr(policy, "plan_rebalance"):
        function = getattr(policy, "rebalance_experts", None)
        found = tuple(inspect.signature(function).parameters) if function is not None else ()
        if found != EPLB_ARGUMENTS and "context" not in found:
            raise _moved(f"{_EPLB}.AbstractEplbPolicy.rebalance_experts", f"takes {found}")
    if "context" in found:
        _named(_EPLB, "EplbPlan")  # the answer to a context
    state = _named(_EPLB_STATE, "EplbState")
    missing = [name for name in EPLB_STATE_METHODS if not callable(getattr(state, name, None))]
    if missing:
        raise _moved(f"{_EPLB_STATE}.EplbState", f"has no {', '.join(missing)}")
    _warn_if_untested()


def vllm_version() -> str | None:
    """Return the version of the installed vLLM; None means that there is none."""
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return None


def _named(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        if vllm_version() is None:
            raise VllmInterfaceError(f"moestro-vllm needs vLLM, which is not installed: {_advice()}") from error
        raise _moved(f"{module}.{name}", f"cannot be imported ({error})") from error


def _moved(what: str, how: str) -> VllmInterfaceError:
    return VllmInterfaceError(
        f"moestro-vllm cannot work with vLLM {vllm_version() or 'of unknown version'}: {what} {how};"
        f" tested with {_tested()}: {_advice()}"
    )


def _tested() -> str:
    return " and ".join(f"{version}.x" for version in TESTED)


def _advice() -> str:
    return (
        f"install vLLM {TESTED[-1]}, or a later moestro-vllm, or leave out --scheduler-cls and MOESTRO_VLLM_PLACEMENT"
    )


def _difference(expected: Iterable[str], found: Iterable[str]) -> str:
    more, less = sorted(set(found) - set(expected)), sorted(set(expected) - set(found))
    parts = [f"also asks for {', '.join(more)}"] if more else []
    parts += [f"no longer has {', '.join(less)}"] if less else []
    return " and ".join(parts)


def _warn_if_untested() -> None:
    version = vllm_version() or "of unknown version"
    if not version.startswith(tuple(f"{each}." for each in TESTED)):
        _logger.warning(
            "moestro-vllm was tested with vLLM %s and not with %s; its interface looks the same", _tested(), version
        )
