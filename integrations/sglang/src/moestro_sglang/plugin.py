"""The entry point `sglang.srt.plugins`: SGLang calls `register` once in every process, before it serves."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

ORDER = "MOESTRO_SGLANG_ORDER"  # an order policy with its settings; unset: SGLang keeps its own
PLACEMENT = "MOESTRO_SGLANG_PLACEMENT"  # a placement policy with its settings; unset: SGLang keeps its own
BE_PRIORITY = "MOESTRO_SGLANG_BE_PRIORITY"  # requests of this priority or a less urgent one are best effort
DP_POLICY = "MOESTRO_SGLANG_DP_POLICY"  # a routing policy with its settings; unset: SGLang keeps its own

_logger = logging.getLogger(__name__)


def register() -> None:
    """Register the hooks that the environment asks for. Without a variable nothing is imported.

    Raises:
        SystemExit: A variable has a wrong value, or SGLang's interface has moved. SGLang logs any other exception of a
            plug-in and serves without it.
    """
    given = {name: os.environ[name] for name in (ORDER, PLACEMENT, DP_POLICY) if os.environ.get(name)}
    if os.environ.get(BE_PRIORITY) and ORDER not in given:
        raise SystemExit(f"moestro-sglang: {BE_PRIORITY} is read by an order policy: set {ORDER} too, or unset it")
    if not given:
        return
    from moestro.errors import MoestroError  # noqa: PLC0415
    from moestro_sglang.interface import SglangInterfaceError, check_interface  # noqa: PLC0415

    try:
        hooks = _hooks(given)
        check_interface(hooks)
    except (MoestroError, SglangInterfaceError) as error:
        raise SystemExit(f"moestro-sglang: {error}") from None
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    for target, (kind, hook) in hooks.items():
        HookRegistry.register(target, hook, HookType[kind])
    _logger.info("Moestro in SGLang: %s", " ".join(f"{name}={value}" for name, value in given.items()))


def _hooks(given: Mapping[str, str]) -> dict[str, tuple[str, object]]:
    """Return the hooks by their target, each with its kind."""
    hooks: dict[str, tuple[str, object]] = {}
    if ORDER in given:
        from moestro_sglang.order_hooks import order_hooks  # noqa: PLC0415

        hooks |= order_hooks(given[ORDER], os.environ)
    if PLACEMENT in given:
        from moestro_sglang.placement_hooks import placement_hooks  # noqa: PLC0415

        hooks |= placement_hooks(given[PLACEMENT], os.environ)
    if DP_POLICY in given:
        from moestro_sglang.rank_hooks import rank_hooks  # noqa: PLC0415

        hooks |= rank_hooks(given[DP_POLICY])
    return hooks
