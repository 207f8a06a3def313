"""Layered prefill: prompts advance one group of layers for each pass of the decodes through all layers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from moestro.core.views import ATTENTION, BE, EVERY_EXPERT, LS, QueueTable, Run
from moestro.errors import ConfigError
from moestro.flow.policies.basic import ALL
from moestro.flow.policies.one_queue import can_run, total
from moestro.flow.registry import STEP_POLICIES


@STEP_POLICIES.register(
    "layered_prefill",
    "Prompts advance by one of `num_groups` groups of layers while decodes pass all layers, and share its batches.",
    source="Layered Prefill, arXiv:2510.08055",
)
@dataclass(kw_only=True)
class LayeredPrefill:
    """Runs decodes through all layers; in one group of layers the waiting prompts join them.

    A prompt then loads the experts of each layer once, whatever its length, while decodes never wait for more than one
    group of it. With chunks it would load them once a chunk. Prompts that wait together form one wave, and later ones
    wait before layer 0 until the wave has left the network. Without decodes the wave runs on, group by group.

    Decodes pass all layers in one `Run` where no prompt joins them. A pass ends when no decode waits beyond layer 0.
    On an attention worker, experts are elsewhere, so a pass is that of a fragment of the decodes.

    Bound: decodes wait for at most one group of the wave in each pass, a wave for at most one pass in each group. A
    prompt that came later waits for up to `num_groups` passes of the wave before it.

    Attributes:
        num_groups: groups of contiguous layers, equal up to one layer. At most one for each layer is of use; 1 makes a
            wave pass all layers together with one pass of the decodes.

    Raises:
        ConfigError: `num_groups` is below 1.

    Source: Lee et al., "From Tokens to Layers", section 3; 16 groups for prompts of up to 8192 tokens are the command
        line of its code (scale-snu/layered-prefill), in place of chunks of 512.
    """

    num_groups: int = 16
    _wave_layer: int = field(default=0, init=False, compare=False)  # where the wave was when this pass began

    def __post_init__(self) -> None:
        if self.num_groups < 1:
            raise ConfigError("num_groups must be at least 1")

    def __call__(self, view: QueueTable, now_ns: int) -> Run:
        """Observe where the wave is when a pass begins; then run the deepest tokens, and prompts in their group."""
        attention, prefill = total(view.n)[:, ATTENTION], total(view.num_prefill_tokens)
        waits = np.flatnonzero(prefill)
        wave_layer = int(waits[-1]) if len(waits) else 0
        if not (attention - prefill)[1:].any() and not total(view.num_expert_tokens).any():
            self._wave_layer = wave_layer
        return self.decide(view, wave_layer)

    def decide(self, view: QueueTable, wave_layer: int) -> Run:
        """Return what runs next, with the wave of prompts before `wave_layer`. This changes nothing."""
        among_experts = np.flatnonzero(can_run(view)[:, ATTENTION + 1 :].any(axis=1))
        if len(among_experts):  # a withdrawn run left them; they complete their layer before anything passes
            return Run(int(among_experts[-1]), EVERY_EXPERT, ALL, (LS, BE))
        attention, prefill = total(view.n)[:, ATTENTION], total(view.num_prefill_tokens)
        runnable, num_layers = can_run(view)[:, ATTENTION], len(attention) - 1
        stop = self._end_of_group(self._wave_layer, num_layers)
        decodes = np.flatnonzero(runnable & (attention > prefill))
        may_join = prefill.any() and runnable[wave_layer] and wave_layer < stop
        if len(decodes) == 0:
            layer = wave_layer if runnable[wave_layer] else int(np.flatnonzero(runnable)[-1])
            return Run(layer, ATTENTION, ALL, (LS, BE), self._end_of_group(layer, num_layers))
        layer = int(decodes[-1])
        if may_join and wave_layer == layer:
            return Run(layer, ATTENTION, ALL, (LS, BE), stop)
        until = wave_layer if may_join and wave_layer > layer else ALL
        return Run(layer, ATTENTION, ALL, (LS, BE), until, max_unit_tokens=1)

    def _end_of_group(self, layer: int, num_layers: int) -> int:
        """Return the first layer of the next group; `ALL` after the last, which the sampler belongs to."""
        starts = np.arange(1, self.num_groups + 1) * num_layers // self.num_groups
        later = starts[(starts > layer) & (starts < num_layers)]
        return int(later[0]) if len(later) else ALL
