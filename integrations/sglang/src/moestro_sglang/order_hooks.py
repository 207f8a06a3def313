"""Hooks of SGLang's scheduler, which put the waiting list into the order of one of Moestro's policies."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from moestro.engine.hosted_order import host_order
from moestro.errors import ConfigError
from moestro_sglang.interface import API_STATE, CALC_PRIORITY, DP_STATE, INIT_ORDER
from moestro_sglang.plugin import BE_PRIORITY, ORDER
from moestro_sglang.waiting_order import ARRIVAL, WaitingOrder

_STATE = "moestro_order"  # attribute of SGLang's SchedulePolicy

_logger = logging.getLogger(__name__)


def order_hooks(text: str, environment: Mapping[str, str]) -> dict[str, tuple[str, object]]:
    """Return the hooks of an order policy by their target, each with its kind.

    Args:
        text: `NAME` or `NAME:SETTING=VALUE,...`.
        environment: All variables.

    Raises:
        ConfigError: A variable has a wrong value; the text names it.
    """
    be_priority = _whole(environment.get(BE_PRIORITY))
    try:
        host_order(text, be_priority, reads_priority=False)
    except ConfigError as error:
        raise ConfigError(f"{ORDER}={text}: {error}") from None
    _carry_arrivals()
    return {
        INIT_ORDER: ("AFTER", _prepare(text, be_priority)),
        CALC_PRIORITY: ("AFTER", _sort),
        API_STATE: ("AFTER", _with_arrival),
        DP_STATE: ("AFTER", _with_arrival),
    }


def _whole(text: str | None) -> int | None:
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{BE_PRIORITY} must be a whole number, got {text!r}") from None


def _prepare(text: str, be_priority: int | None) -> Callable[..., None]:
    """Return the hook after `SchedulePolicy.__init__`, which makes the order of this scheduler."""

    def prepare(_result: None, policy: Any, *_args: Any, **_kwargs: Any) -> None:
        if policy.policy.value != "fcfs":
            raise ConfigError(
                f"--schedule-policy {policy.policy.value} does not go with {ORDER}={text}, which orders the waiting"
                " requests itself: leave --schedule-policy out"
            )
        order = host_order(
            text,
            be_priority,
            reads_priority=policy.enable_priority_scheduling,
            low_first=policy.priority_sign > 0,
        )
        setattr(policy, _STATE, WaitingOrder(order, _look_up(policy.tree_cache)))
        _logger.info("Moestro orders waiting requests by %s: %s", text, order.in_words())

    return prepare


def _look_up(tree_cache: Any) -> Callable[[Any], int]:
    def num_cached(request: Any) -> int:
        match_kv_cache = importlib.import_module("sglang.srt.managers.schedule_policy").match_kv_cache
        match_kv_cache(request, tree_cache)
        return int(request.num_matched_prefix_tokens)

    return num_cached


def _sort(_result: None, policy: Any, waiting_queue: list[Any], *_args: Any, **_kwargs: Any) -> None:
    """Sort the waiting list after SGLang has looked at it."""
    order = getattr(policy, _STATE, None)
    if order is None:
        return
    try:
        order.sort(waiting_queue)
        order.is_failing = False
    except Exception:  # it would end the scheduler; all ranks have the same requests, so each of them comes here
        if not order.is_failing:  # a step takes milliseconds, and each would log the same
            _logger.exception("Moestro cannot order the waiting requests; SGLang's order holds until it can")
        order.is_failing = True


def _carry_arrivals() -> None:
    """Give SGLang's records of times an attribute, which it then copies from process to process."""
    stats = importlib.import_module("sglang.srt.observability.req_time_stats")
    for name in ("APIServerReqTimeStats", "DPControllerReqTimeStats", "SchedulerReqTimeStats"):
        setattr(getattr(stats, name), ARRIVAL, 0)


def _with_arrival(state: dict[str, Any], stats: Any) -> dict[str, Any]:
    """Add the time of arrival to what is sent; the API server, which sends first, sets it."""
    if not getattr(stats, ARRIVAL):
        setattr(stats, ARRIVAL, time.time_ns())
    return {**state, ARRIVAL: getattr(stats, ARRIVAL)}
