"""Settings of the placement inside other engines: environment variables, which the engines pass on to their workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from moestro.cost.gpus import gpu_named
from moestro.cost.links import link_named
from moestro.cost.named_parts import read_network
from moestro.errors import ConfigError
from moestro.placement.hosted import Planner
from moestro.placement.prices import place_prices
from moestro.placement.registry import PLACE_POLICIES

# Suffixes of the variables, with their defaults.
PRICE_DEFAULTS = {
    "NETWORK": "deepseek-v3",
    "GPU": "h100",
    "LINK_WITHIN": "nvswitch-h100",
    "LINK_ACROSS": "infiniband-ndr",
}
# The engines give copies equal parts of the tokens, so a policy that can plan with that must.
_EQUAL_PARTS = {"moestro": "weighted=0"}


@dataclass(frozen=True, slots=True)
class HostVariables:
    """Environment variables of one engine's plug-in, which share a prefix (`MOESTRO_VLLM_`).

    Attributes:
        prefix: What all names begin with.
        values: All variables of the process.
    """

    prefix: str
    values: Mapping[str, str]

    def get(self, suffix: str, default: str = "") -> str:
        """Return the value of a variable; an empty one counts as unset."""
        return self.values.get(self.prefix + suffix) or default

    def whole(self, suffix: str, default: int, least: int = 1) -> int:
        """Return the value of a variable that is a whole number.

        Raises:
            ConfigError: It is none, or below `least`.
        """
        text = self.get(suffix, str(default))
        if not text.isdecimal() or int(text) < least:
            raise ConfigError(f"{self.prefix}{suffix} must be a whole number, {least} or more, got {text!r}")
        return int(text)


def planner_from(text: str, variables: HostVariables) -> Planner:
    """Make the planner that the environment asks for.

    Args:
        text: Placement policy, `NAME` or `NAME:SETTING=VALUE,...`.
        variables: The plug-in's variables; PRICE_DEFAULTS has the ones that are read.

    Raises:
        ConfigError: A variable has a value that is not known or out of range; the text names it.
    """
    prefix = variables.prefix
    given = {suffix: variables.get(suffix, default) for suffix, default in PRICE_DEFAULTS.items()}
    try:
        policy = PLACE_POLICIES.make(policy_text(text))
    except ConfigError as error:
        raise ConfigError(f"{prefix}PLACEMENT={text}: {error}") from None
    try:
        prices = place_prices(
            read_network(given["NETWORK"]),
            gpu_named(given["GPU"]),
            link_named(given["LINK_WITHIN"]),
            link_named(given["LINK_ACROSS"]),
        )
    except ConfigError as error:
        raise ConfigError(f"{prefix}NETWORK, _GPU, _LINK_WITHIN or _LINK_ACROSS: {error}") from None
    # The engines leave no slot empty, so all ranks read equally many experts, whatever the placement.
    return Planner(policy, replace(prices, expert_s=0.0))


def policy_text(text: str) -> str:
    """Add the settings that fit the engines' equal parts to a policy's name, unless `text` has them."""
    name, _, settings = text.partition(":")
    fitting = _EQUAL_PARTS.get(name)
    if fitting is None or fitting.partition("=")[0] in settings:
        return text
    return f"{name}:{','.join(filter(None, (settings, fitting)))}"
