"""The entry point `vllm.general_plugins`: vLLM calls `register` once in every process, before it loads a model."""

from __future__ import annotations

import logging
import os

PLACEMENT = "MOESTRO_VLLM_PLACEMENT"  # a placement policy with its settings; unset: vLLM keeps its own
START_FILE = "MOESTRO_VLLM_START_FILE"  # a file of `moestro place --sglang`; unset: vLLM's own first placement

_logger = logging.getLogger(f"vllm.{__name__}")  # vLLM's handlers print the loggers below "vllm"


def register() -> None:
    """Put Moestro's placement in the place of vLLM's, if a variable asks for it.

    A second call changes nothing. Without the variables nothing is imported, and vLLM stays as it is.

    Raises:
        ConfigError: A variable has a wrong value.
        VllmInterfaceError: vLLM's interface has moved.
    """
    given = [f"{name}={os.environ[name]}" for name in (PLACEMENT, START_FILE) if os.environ.get(name)]
    if not given:
        return
    from moestro_vllm.interface import check_eplb_interface  # noqa: PLC0415
    from moestro_vllm.rebalancing import rebalancing_from  # noqa: PLC0415

    rebalancing = rebalancing_from(os.environ)
    check_eplb_interface()
    from moestro_vllm.eplb_policy import install  # noqa: PLC0415  the check explains a failure

    install(rebalancing)
    _logger.info("Moestro places experts in vLLM: %s", " ".join(given))
