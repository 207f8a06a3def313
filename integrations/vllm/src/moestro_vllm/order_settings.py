"""Makes the order policy of a scheduler class, with the settings that vLLM's `--additional-config` passes on."""

from __future__ import annotations

from collections.abc import Mapping

from moestro.core.clock import NS_PER_S
from moestro.core.order_contract import OrderPolicy
from moestro.engine.registry import ORDER_POLICIES
from moestro.errors import ConfigError

CONFIG_KEY = "moestro"  # `--additional-config '{"moestro": {"theta_age_s": 2}}'`


def policy_text(name: str, additional_config: object) -> str:
    """Return `NAME:SETTING=VALUE,...` from vLLM's `additional_config`, of which other keys are left to others.

    Raises:
        ConfigError: The settings are no JSON object of numbers and words.
    """
    given = additional_config.get(CONFIG_KEY, {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(given, Mapping):
        raise ConfigError(f'--additional-config: "{CONFIG_KEY}" must be an object of settings, got {given!r}')
    for setting, value in given.items():
        if not isinstance(value, int | float | str) or isinstance(value, bool):
            raise ConfigError(f'--additional-config: "{CONFIG_KEY}": {setting} must be a number, got {value!r}')
    settings = ",".join(f"{setting}={value}" for setting, value in given.items())
    return f"{name}:{settings}" if settings else name


def make_order_policy(name: str, additional_config: object) -> OrderPolicy:
    """Make the order policy `name`.

    Raises:
        ConfigError: The policy has no such setting, or a value is out of range.
    """
    return ORDER_POLICIES.make(policy_text(name, additional_config))


def bound_in_words(policy: OrderPolicy) -> str:
    """Return how long a later arrival can still pass a request, for the log."""
    bound_ns = policy.max_passed_over_ns
    if bound_ns is None:
        return "no bound in time on being passed over"
    return f"a request is passed over only by those that arrive up to {bound_ns / NS_PER_S:g} s after it"


def refuse_other_order(scheduling_policy: str, scheduler_class: str) -> None:
    """Refuse vLLM's own priorities beside a scheduler class of ours.

    vLLM would preempt running requests by priority, and the waiting queue would order them otherwise.

    Raises:
        ConfigError: vLLM was started with `--scheduling-policy priority`.
    """
    if scheduling_policy != "fcfs":
        raise ConfigError(
            f"--scheduling-policy {scheduling_policy} does not go with --scheduler-cls moestro_vllm.{scheduler_class},"
            " which orders the waiting requests itself: leave --scheduling-policy out"
        )
