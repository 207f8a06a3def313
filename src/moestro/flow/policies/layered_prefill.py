"""Layered prefill: prompts advance one group of layers for each pass of the decodes through all layers."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from moestro.core.views import ATTENTION, BE, EVERY_EXPERT, LS, QueueTable, Run
from moestro.errors import ConfigError
from moestro.flow.policies.one_queue import ALL, can_run, total
from moestro.flow.registry import STEP_POLICIES


@STEP_POLICIES.register(
    "layered_prefill",
    "Prompts advance by one group of layers while decodes pass all layers, and share its batches.",
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
        overlaps_prefill: whether decodes enter the network again while prompts are inside.
        num_groups: most groups of contiguous layers, equal up to one layer. At most one for each layer is of use; 1
            makes a wave pass all layers together with one pass of the decodes.
        tokens_per_group: tokens of a wave for each of its groups, rounded up. A short wave has fewer groups, because it
            delays the decodes less. 1 gives every wave `num_groups`.

    Raises:
        ConfigError: `num_groups` or `tokens_per_group` is below 1.

    Source: Lee et al., "From Tokens to Layers", section 3; its code (scale-snu/layered-prefill) has 16 groups for waves
        of 8192 tokens, and half of them for each half of the tokens, so that 512 have one.
    """

    overlaps_prefill: ClassVar[bool] = True

    num_groups: int = 16
    tokens_per_group: int = 512
    _wave_layer: int = field(default=0, init=False, compare=False)  # where the wave was when this pass began
    _wave_groups: int = field(default=1, init=False, compare=False)

    def __post_init__(self) -> None:
        if self.num_groups < 1 or self.tokens_per_group < 1:
            raise ConfigError(
                f"num_groups and tokens_per_group must be at least 1, got {self.num_groups} and {self.tokens_per_group}"
            )

    def __call__(self, view: QueueTable, now_ns: int) -> Run:
        """Observe where the wave is when a pass begins; then run the deepest tokens, and prompts in their group."""
        attention, prefill = total(view.n[:, :, ATTENTION]), total(view.num_prefill_tokens)
        waits = np.flatnonzero(prefill)
        wave_layer = int(waits[-1]) if len(waits) else -1
        is_inside = np.count_nonzero(attention[1:] - prefill[1:]) or np.count_nonzero(view.num_expert_tokens)
        if not is_inside:
            self._wave_layer = max(wave_layer, 0)
            if wave_layer == 0:
                self._wave_groups = min(-(-int(prefill[0]) // self.tokens_per_group), self.num_groups)
        return self.decide(view, attention - prefill, wave_layer)

    def decide(self, view: QueueTable, decodes: NDArray[np.int32], wave_layer: int) -> Run:
        """Return what runs next. This changes nothing.

        Args:
            view: the queues.
            decodes: int32[num_layers + 1], decodes before each attention.
            wave_layer: layer before whose attention the wave of prompts waits; -1 if none does.
        """
        if np.count_nonzero(view.num_expert_tokens):  # a withdrawn run left them; they complete their layer first
            layer = int(np.flatnonzero(total(view.num_expert_tokens))[-1])
            return Run(layer, EVERY_EXPERT, ALL, (LS, BE))
        runnable = can_run(view)[:, ATTENTION]
        ready = np.flatnonzero(runnable & (decodes > 0))
        if len(ready) == 0:
            layer = wave_layer if runnable[wave_layer] else int(np.flatnonzero(runnable)[-1])
            return Run(layer, ATTENTION, ALL, (LS, BE), self._end_of_group(layer, len(decodes) - 1))
        layer, stop = int(ready[-1]), self._end_of_group(self._wave_layer, len(decodes) - 1)
        may_join = layer <= wave_layer < stop and bool(runnable[wave_layer])
        if may_join and layer == wave_layer:
            return Run(layer, ATTENTION, ALL, (LS, BE), stop)
        return Run(layer, ATTENTION, ALL, (LS, BE), wave_layer if may_join else ALL, max_unit_tokens=1)

    def _end_of_group(self, layer: int, num_layers: int) -> int:
        """Return the first layer of the next group; `ALL` after the last, which the sampler belongs to."""
        starts = _group_starts(num_layers, self._wave_groups)
        after = bisect_right(starts, layer)
        return starts[after] if after < len(starts) else ALL


@cache
def _group_starts(num_layers: int, num_groups: int) -> tuple[int, ...]:
    """Return the first layer of each group, ascending; groups without a layer are left out."""
    return tuple(sorted({group * num_layers // num_groups for group in range(num_groups)}))
