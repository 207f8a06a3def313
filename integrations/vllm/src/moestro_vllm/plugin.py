"""The entry point `vllm.general_plugins`: vLLM calls `register` once in every process, before it loads a model."""

from __future__ import annotations

import logging
import os

PLACEMENT = "MOESTRO_VLLM_PLACEMENT"  # a placement policy with its settings; unset: vLLM keeps its own

_logger = logging.getLogger(f"vllm.{__name__}")  # vLLM's handlers print the loggers below "vllm"


def register() -> None:
    """Put Moestro's placement in the place of vLLM's, if MOESTRO_VLLM_PLACEMENT names a policy.

    A second call changes nothing. Without the variable nothing is imported, and vLLM stays as it is.

    Raises:
        ConfigError: A variable has a wrong value.
        VllmInterfaceError: vLLM's interface has moved.
    """
    if not os.environ.get(PLACEMENT):
        return
    from moestro_vllm.interface import EPLB_KEY, check_eplb_interface  # noqa: PLC0415
    from moestro_vllm.placement_settings import planner_from  # noqa: PLC0415

    planner = planner_from(os.environ[PLACEMENT], os.environ)
    check_eplb_interface()
    from vllm.distributed.eplb.policy import EPLB_POLICIES  # noqa: PLC0415  the check explains a failure

    from moestro_vllm.eplb_policy import policy_class  # noqa: PLC0415

    EPLB_POLICIES[EPLB_KEY] = policy_class(planner)
    _logger.info("Moestro places experts in vLLM: %s=%s", PLACEMENT, os.environ[PLACEMENT])
