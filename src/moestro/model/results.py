"""Turns a step's logits into its result, in two halves: the device's computation, and the host's reading.

The first half never waits for an accelerator. The second runs once the step's event has passed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moestro.core.request import TokenLogprobs
from moestro.core.work import LOGITS_LAST, LOGITS_PROMPT, StepResult, StepVisits, Units
from moestro.model.experts.expert_visits import VisitTensor
from moestro.model.logit_edits import edit_logits, unmasked_units
from moestro.model.sampler import LogprobTensors, find_peaks, measure_logprobs, sample
from moestro.model.step import Int64s, PagedStep, SampledTokens

_NO_TOKEN = -1  # placeholder token of a row with non-finite logits
_EXCLUDED = -2  # placeholder token of a row whose edits exclude all tokens
_MAX_MEASURED_ROWS = 256  # log probabilities of a long prompt come in pieces, because each copies its logits


@dataclass(frozen=True, slots=True, eq=False)
class LogprobRows:
    """Log probabilities of some rows.

    Attributes:
        units: int64[n], unit of the step to which each row belongs.
        num_top: int32[n], alternatives that it reports.
        tensors: the rows.
    """

    units: Int64s
    num_top: NDArray[np.int32]
    tensors: LogprobTensors

    def non_finite_units(self) -> Int64s:
        """Units, possibly repeated, of rows with non-finite logits, whose log probability is NaN."""
        units: Int64s = self.units[self.tensors.logprobs.isnan().numpy()]
        return units

    def entries(self) -> dict[int, tuple[TokenLogprobs, ...]]:
        """Rows of each unit, in order."""
        found: dict[int, list[TokenLogprobs]] = {}
        for unit, entry in zip(self.units.tolist(), self.tensors.rows(self.num_top), strict=True):
            found.setdefault(unit, []).append(entry)
        return {unit: tuple(entries) for unit, entries in found.items()}


@dataclass(frozen=True, slots=True, eq=False)
class PendingResult:
    """Results of a launched step, on their way to the host.

    Attributes:
        units: units of the step.
        sampled_units: int64[n], units that request a token.
        tokens: int64[n], their tokens; `_NO_TOKEN` or `_EXCLUDED` where there is none.
        on_device: the same, for the step after.
        sampled, prompt: log probabilities of sampled and of prompt tokens, where some unit requests them.
        expert_counts: int64[layers, experts]; None for a dense model.
        expert_choices, visits, unmasked: as in `StepResult`.
        done: event that passes when everything is on the host; None means that it is.
    """

    units: Units
    sampled_units: Int64s
    tokens: Tensor
    on_device: SampledTokens
    sampled: LogprobRows | None
    prompt: LogprobRows | None
    expert_counts: Tensor | None
    expert_choices: Tensor | None = None
    visits: VisitTensor | None = None
    unmasked: Int64s | None = None
    done: Any = None  # torch.cuda.Event, whose methods torch leaves untyped

    @property
    def ready(self) -> bool:
        """Whether `read` may be called."""
        return self.done is None or bool(self.done.query())

    def read(self) -> StepResult:
        """Return the result in host types."""
        token_ids = np.full(len(self.units), -1, np.int32)
        tokens = self.tokens.numpy()
        token_ids[self.sampled_units] = np.maximum(tokens, -1)
        sampled = {} if self.sampled is None else self.sampled.entries()
        return StepResult(
            slot=self.units.slot,
            token_ids=token_ids,
            non_finite=self._non_finite(tokens),
            excluded=self._excluded(tokens),
            unmasked=self.unmasked,
            logprobs={unit: entries[0] for unit, entries in sampled.items()},
            prompt_logprobs={} if self.prompt is None else self.prompt.entries(),
            expert_counts=None if self.expert_counts is None else self.expert_counts.numpy(),
            expert_choices=None if self.expert_choices is None else self.expert_choices.numpy(),
            visits=None
            if self.visits is None
            else StepVisits(self.visits.version, self.visits.ends, self.visits.num_pairs.numpy()),
        )

    def _non_finite(self, tokens: Int64s) -> Int64s | None:
        """Return `StepResult.non_finite`. `tokens`: on the host."""
        found = self.sampled_units[tokens < 0]
        if self.prompt is not None:
            found = np.union1d(found, self.prompt.non_finite_units())
        return found if len(found) else None

    def _excluded(self, tokens: Int64s) -> Int64s | None:
        """Return `StepResult.excluded`. `tokens`: on the host."""
        if self.units.edits is None:
            return None
        found = self.sampled_units[tokens == _EXCLUDED]
        return found if len(found) else None


def compute_result(
    step: PagedStep,
    logits: Tensor,
    expert_counts: Tensor | None,
    expert_choices: Tensor | None = None,
    visits: VisitTensor | None = None,
) -> PendingResult:
    """Sample, measure log probabilities, and start all copies to the host.

    Args:
        logits: [requested rows, vocabulary], in the order of `step.logit_rows`.
        expert_counts: int64[layers, experts], or None.
        expert_choices, visits: as in `StepResult`.
    """
    units = step.units
    sampled_units = np.flatnonzero(units.logits & LOGITS_LAST)
    last = logits
    if len(sampled_units) < len(logits):
        last = logits[step.upload(np.searchsorted(step.logit_rows, step.end_row_of[sampled_units] - 1))]
    is_every_unit = len(sampled_units) == len(units)  # as in most steps
    sampling = units.sampling if is_every_unit else units.sampling[sampled_units]
    positions = step.length_of if is_every_unit else step.length_of[sampled_units]
    edited = last
    if units.edits is not None:
        edited = edit_logits(last, units.edits, sampled_units, sampling, step.tokens_before(sampled_units))
    tokens, is_finite = find_peaks(edited)
    tokens = sample(edited, sampling, positions, tokens)
    if edited is not last:
        tokens = tokens.where(is_finite, _EXCLUDED)
        is_finite = find_peaks(last).is_finite
    tokens = tokens.where(is_finite, _NO_TOKEN)
    sampled = _measure_sampled(step, sampled_units, last, tokens)
    prompt = _measure_prompts(step, logits)
    unmasked = unmasked_units(units.edits)
    on_device = SampledTokens(units.slot[sampled_units], tokens)
    if logits.device.type == "cpu":
        return PendingResult(
            units, sampled_units, tokens, on_device, sampled, prompt, expert_counts, expert_choices, visits, unmasked
        )
    tokens, sampled, prompt = to_host(tokens), _measured_to_host(sampled), _measured_to_host(prompt)
    expert_counts = None if expert_counts is None else to_host(expert_counts)
    expert_choices = None if expert_choices is None else to_host(expert_choices)
    visits = None if visits is None else visits._replace(num_pairs=to_host(visits.num_pairs))
    done = cast(Any, torch.cuda.Event)()
    done.record(torch.cuda.current_stream(logits.device))  # the process's current device may differ
    return PendingResult(
        units, sampled_units, tokens, on_device, sampled, prompt, expert_counts, expert_choices, visits, unmasked, done
    )


def _measure_sampled(step: PagedStep, sampled_units: Int64s, last: Tensor, tokens: Tensor) -> LogprobRows | None:
    """Measure the log probabilities of sampled tokens; a row without a token gets those of any."""
    num_top: NDArray[np.int32] = step.units.sampling["num_logprobs"][sampled_units]
    rows = np.flatnonzero(num_top >= 0)
    if not len(rows):
        return None
    at = step.upload(rows)
    tensors = measure_logprobs(last[at], tokens[at].clamp(min=0), int(num_top.max()))
    return LogprobRows(sampled_units[rows], num_top[rows], tensors)


def _measure_prompts(step: PagedStep, logits: Tensor) -> LogprobRows | None:
    units = step.units
    asks = units.logits & LOGITS_PROMPT != 0
    if not asks.any():
        return None
    assert units.next_token_ids is not None, "a unit asks for prompt logprobs without the tokens that follow"
    unit_of_row = np.repeat(np.arange(len(units)), step.num_tokens_of)
    token_rows = np.flatnonzero(asks[unit_of_row])
    of_unit = unit_of_row[token_rows]
    num_top: NDArray[np.int32] = units.sampling["num_prompt_logprobs"][of_unit].clip(0)
    rows = np.searchsorted(step.logit_rows, token_rows)
    next_ids, most = units.next_token_ids.astype(np.int64), int(num_top.max())
    parts = [
        measure_logprobs(logits[step.upload(rows[piece])], step.upload(next_ids[piece]), most)
        for piece in (slice(i, i + _MAX_MEASURED_ROWS) for i in range(0, len(rows), _MAX_MEASURED_ROWS))
    ]
    return LogprobRows(of_unit, num_top, LogprobTensors.join(parts))


def _measured_to_host(measured: LogprobRows | None) -> LogprobRows | None:
    return measured and LogprobRows(measured.units, measured.num_top, measured.tensors.map(to_host))


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy that the host may read once the step's event has passed; on a CPU, the tensor itself."""
    if tensor.device.type == "cpu":
        return tensor
    # Contiguous whatever `tensor` is: to memory with gaps or with its dimensions in another order, torch copies by way
    # of a second host tensor, which it reads before the data have arrived.
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
