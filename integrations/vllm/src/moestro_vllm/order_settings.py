"""Makes the order of a scheduler class, with the settings that vLLM's `--additional-config` passes on."""

from __future__ import annotations

from collections.abc import Mapping

from moestro.engine.hosted_order import HostOrder, host_order, text_and_class
from moestro.errors import ConfigError

CONFIG_KEY = "moestro"  # `--additional-config '{"moestro": {"theta_age_s": 2}}'`
_PLACE = f'--additional-config: "{CONFIG_KEY}"'


def make_order(name: str, additional_config: object, scheduling_policy: str = "fcfs") -> tuple[HostOrder, str]:
    """Make the order of a scheduler class.

    Args:
        name: Name of the order policy.
        additional_config: vLLM's `additional_config`, of which other keys are left to others.
        scheduling_policy: vLLM's `--scheduling-policy`; with `priority`, vLLM preempts by priority.

    Returns:
        The order, and its policy with all settings that were given.

    Raises:
        ConfigError: The settings are no object of numbers and words, the policy has no such setting, or a value is out
            of range.
    """
    given = additional_config.get(CONFIG_KEY, {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{_PLACE} must be an object of settings, got {given!r}")
    text, be_priority = text_and_class(name, given, _PLACE)
    return host_order(text, be_priority, reads_priority=scheduling_policy == "priority"), text
