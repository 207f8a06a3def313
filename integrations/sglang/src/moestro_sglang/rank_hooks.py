"""Hooks of SGLang's data-parallel controller, which ask one of Moestro's routing policies for a rank."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from moestro.errors import ConfigError, NoEngineError
from moestro_sglang.interface import CHOOSE_RANK, INIT_BUDGET, READ_METHOD, UPDATE_BUDGET
from moestro_sglang.plugin import DP_POLICY
from moestro_sglang.rank_choice import RankChoice

_STATE = "moestro_choice"  # attribute of SGLang's DPBudget

_logger = logging.getLogger(__name__)


def rank_hooks(text: str) -> dict[str, tuple[str, object]]:
    """Return the hooks of a routing policy by their target, each with its kind.

    Raises:
        ConfigError: The policy cannot be used; the text says why.
    """
    try:
        RankChoice(text, 2)
    except ConfigError as error:
        raise ConfigError(f"{DP_POLICY}={text}: {error}") from None
    return {
        READ_METHOD: ("AFTER", _check_method(text)),
        INIT_BUDGET: ("AFTER", _prepare(text)),
        UPDATE_BUDGET: ("AFTER", _report),
        CHOOSE_RANK: ("AROUND", _choose),
    }


def _check_method(text: str) -> Callable[..., None]:
    def check(method: Any, *_args: Any, **_kwargs: Any) -> None:
        """Refuse a method of balancing that asks no policy and reads no load."""
        if method.name != "TOTAL_TOKENS":
            raise ConfigError(
                f"--load-balance-method {method.name.lower()} does not go with {DP_POLICY}={text}: give"
                " --load-balance-method total_tokens, whose place the policy takes"
            )

    return check


def _prepare(text: str) -> Callable[..., None]:
    def prepare(_result: None, budget: Any, num_dp_ranks: int) -> None:
        setattr(budget, _STATE, RankChoice(text, num_dp_ranks))

    return prepare


def _report(_result: None, budget: Any, loads: Any) -> None:
    """Take in the loads of the ranks, which SGLang reads at most every 20 ms."""
    choice: RankChoice = getattr(budget, _STATE)
    try:
        choice.report(loads, time.time_ns())
        choice.is_failing = False
    except Exception:  # it would end the controller, and with it the server
        if not choice.is_failing:  # reports come every few milliseconds, and each would log the same
            _logger.exception("Moestro cannot read the loads of the ranks; the policy keeps those before")
        choice.is_failing = True


def _choose(original: Callable[..., Any], controller: Any, req: Any) -> None:
    """Send a request to the rank that the policy chooses, unless it names one itself; without any, SGLang decides."""
    if controller.maybe_external_dp_rank_routing(req):
        return
    try:
        worker = controller.workers[_rank(controller, req)]
    except NoEngineError:
        worker = None
    except Exception:  # it would end the controller, and with it the server
        _logger.exception("Moestro chose no rank; SGLang chooses one for this request")
        worker = None
    if worker is None:
        original(controller, req)
        return
    importlib.import_module("sglang.srt.managers.data_parallel_controller").sock_send(worker, req)


def _rank(controller: Any, req: Any) -> int:
    """Return the rank that the policy chooses for a request.

    Raises:
        NoEngineError: No rank is available.
    """
    choice: RankChoice = getattr(controller.dp_budget, _STATE)
    workers = controller.workers
    choice.set_available([worker is not None and bool(controller.status[i]) for i, worker in enumerate(workers)])
    given = getattr(getattr(req, "sampling_params", None), "custom_params", None)
    user = given.get("user") if isinstance(given, Mapping) else None
    return choice.choose(
        getattr(req, "input_ids", None),
        time.time_ns(),
        cache=f"{getattr(req, 'lora_id', None) or ''}|{getattr(req, 'extra_key', None) or ''}",
        user=None if user is None else str(user),
        session=getattr(req, "session_id", None),
    )
