"""Settings of the placement inside vLLM: environment variables, which vLLM passes on to every worker."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from moestro.cost.gpus import gpu_named
from moestro.cost.hf_config import network_from_config, network_named
from moestro.cost.links import link_named
from moestro.cost.networks import NetworkShape
from moestro.errors import ConfigError
from moestro.files.text_files import read_text
from moestro.placement.prices import place_prices
from moestro.placement.registry import PLACE_POLICIES
from moestro_vllm.placement import LoadWindow, Planner
from moestro_vllm.plugin import PLACEMENT

DEFAULTS = {
    "MOESTRO_VLLM_NETWORK": "deepseek-v3",
    "MOESTRO_VLLM_GPU": "h100",
    "MOESTRO_VLLM_LINK_WITHIN": "nvswitch-h100",
    "MOESTRO_VLLM_LINK_ACROSS": "infiniband-ndr",
    # vLLM's own defaults of `--eplb-config`, which it does not tell a policy.
    "MOESTRO_VLLM_WINDOW_SIZE": "1000",
    "MOESTRO_VLLM_STEP_INTERVAL": "3000",
}
# vLLM gives copies equal parts of the tokens, so a policy that can plan with that must.
_EQUAL_PARTS = {"moestro": "weighted=0"}


def planner_from(text: str, environment: Mapping[str, str]) -> Planner:
    """Make the planner that the environment asks for.

    Args:
        text: Value of MOESTRO_VLLM_PLACEMENT: `NAME` or `NAME:SETTING=VALUE,...`.
        environment: All variables.

    Raises:
        ConfigError: A variable has a value that is not known or out of range; the text names it.
    """
    given = {name: environment.get(name) or default for name, default in DEFAULTS.items()}
    try:
        policy = PLACE_POLICIES.make(policy_text(text))
    except ConfigError as error:
        raise ConfigError(f"{PLACEMENT}={text}: {error}") from None
    try:
        prices = place_prices(
            _network(given["MOESTRO_VLLM_NETWORK"]),
            gpu_named(given["MOESTRO_VLLM_GPU"]),
            link_named(given["MOESTRO_VLLM_LINK_WITHIN"]),
            link_named(given["MOESTRO_VLLM_LINK_ACROSS"]),
        )
    except ConfigError as error:
        raise ConfigError(f"MOESTRO_VLLM_NETWORK, _GPU, _LINK_WITHIN or _LINK_ACROSS: {error}") from None
    window = LoadWindow(_steps("MOESTRO_VLLM_WINDOW_SIZE", given), _steps("MOESTRO_VLLM_STEP_INTERVAL", given))
    # vLLM leaves no slot empty, so all ranks read equally many experts, whatever the placement.
    return Planner(policy, replace(prices, expert_s=0.0), window)


def policy_text(text: str) -> str:
    """Add the settings that fit vLLM's equal parts to a policy's name, unless `text` has them."""
    name, _, settings = text.partition(":")
    fitting = _EQUAL_PARTS.get(name)
    if fitting is None or fitting.partition("=")[0] in settings:
        return text
    return f"{name}:{','.join(filter(None, (settings, fitting)))}"


def _network(given: str) -> NetworkShape:
    """A network by name, or from a config.json or its directory."""
    path = Path(given)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        return network_named(given)
    return network_from_config(given, json.loads(read_text(path)))


def _steps(name: str, given: Mapping[str, str]) -> int:
    text = given[name]
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{name} must be a number of steps, 1 or more, got {text!r}")
    return int(text)
