"""The paced device: real processes, real transport, and steps that take as long as a cost model says. No torch here.

It answers at the modelled moment, and until then the rank's loop sleeps: a few cores can show many devices that are not
there. What the answers say comes from `Answers`: the demo network's own tokens, or a fixed sequence.
"""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Protocol

import numpy as np

from moestro.config import ModelSettings, PacedSettings
from moestro.core.request import TokenLogprobs
from moestro.core.work import LOGITS_LAST, LOGITS_PROMPT, Device, Forward, StepResult, Units
from moestro.cost.capacity import kv_blocks
from moestro.cost.gpus import gpu_named
from moestro.cost.hf_config import network_named
from moestro.cost.model import Batch, CostModel
from moestro.cost.roofline import Roofline, RooflineSettings
from moestro.cost.tables import MeasuredCost, load_table
from moestro.serve.messages import ModelInfo

# Ordinary tokens of the demo's vocabulary: none of the special ones, which come first.
_FIRST_TOKEN, _NUM_TOKENS = 300, 1000


class Answers(Protocol):
    """What becomes of an item, when its time has come."""

    def of(self, item: Forward, now_ns: int) -> StepResult:
        """The result of `item`, computed at once."""
        ...


class PacedDevice:
    """A `core.work.Device` on the wall clock.

    Args:
        cost: prices the items; what the rank's own code takes comes on top, some 0.1 ms a step.
        answers: what they bring about.
    """

    def __init__(self, cost: CostModel, answers: Answers) -> None:
        self._cost = cost
        self._answers = answers
        self._pending: deque[tuple[int, StepResult]] = deque()
        self._free_at_ns = 0

    def launch(self, item: Forward, now_ns: int) -> None:
        """See `Device.launch`."""
        price_ns = self._cost.step_ns(Batch(item.units.start, item.units.num_tokens))
        self._free_at_ns = max(now_ns, self._free_at_ns) + price_ns
        self._pending.append((self._free_at_ns, self._answers.of(item, now_ns)))

    def poll(self, now_ns: int) -> list[StepResult]:
        """See `Device.poll`."""
        ready = []
        while self._pending and self._pending[0][0] <= now_ns:
            ready.append(self._pending.popleft()[1])
        return ready

    def ready_at_ns(self) -> int | None:
        """See `Device.ready_at_ns`."""
        return self._pending[0][0] if self._pending else None


class FixedAnswers:
    """A token is a function of its position: the same for every request. It is certain, for whoever asks how likely.

    A request ends at its `max_tokens`: that is all of its script.
    """

    def of(self, item: Forward, now_ns: int) -> StepResult:
        """See `Answers.of`."""
        units = item.units
        samples = units.logits & LOGITS_LAST != 0
        token_ids = np.where(samples, _token_at(units.start + units.num_tokens), -1).astype(np.int32)
        wanted = np.flatnonzero(samples & (units.sampling["num_logprobs"] >= 0)).tolist()
        return StepResult(
            units.slot,
            token_ids,
            logprobs={row: TokenLogprobs(int(token_ids[row]), 0.0, 1) for row in wanted},
            prompt_logprobs=_certain_prompts(units),
        )


class NetworkAnswers:
    """The tokens that a network on this machine computes; it has to be quicker than the device that is played.

    Args:
        device: computes at once, on a CPU.
    """

    def __init__(self, device: Device) -> None:
        self._device = device

    def of(self, item: Forward, now_ns: int) -> StepResult:
        """See `Answers.of`."""
        self._device.launch(item, now_ns)
        (result,) = self._device.poll(now_ns)
        return result


def cost_of(paced: PacedSettings) -> CostModel:
    """What steps take.

    Raises:
        ConfigError: nothing is known of the GPU or the network.
    """
    if paced.table is not None:
        return MeasuredCost(load_table(paced.table))
    return Roofline(RooflineSettings(network=network_named(paced.network), gpu=gpu_named(paced.gpu)))


def paced_info(paced: PacedSettings, model: ModelSettings) -> ModelInfo:
    """What the front door must know where no network is loaded. Text is tokenized as the demo model does it."""
    network, gpu = network_named(paced.network), gpu_named(paced.gpu)
    num_blocks = model.num_gpu_blocks_override or kv_blocks(network, gpu, model.block_size)
    vocab_size = json.loads((Path(model.model) / "config.json").read_text())["vocab_size"]
    return ModelInfo(
        model_id=paced.network,
        max_model_len=min(model.max_model_len or paced.max_model_len, num_blocks * model.block_size),
        vocab_size=vocab_size,
        eos_token_ids=(),
        block_size=model.block_size,
        num_blocks=num_blocks,
        num_parameters=0,
        model_type=paced.network,
        dtype="no arithmetic",
        device=paced.device,
        num_layers=network.num_layers,
        num_experts=network.experts.num_experts if network.experts else 0,
        num_experts_per_token=network.experts.top_k if network.experts else 0,
        notes=(f"{PACED_NOTE} Answers are a fixed sequence of tokens.",),
    )


PACED_NOTE = "Steps take as long as a cost model says; nothing here is a measurement of that device."


def _token_at(position: np.ndarray[tuple[int], np.dtype[np.int32]]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return _FIRST_TOKEN + position % _NUM_TOKENS


def _certain_prompts(units: Units) -> dict[int, tuple[TokenLogprobs, ...]]:
    """An entry for the token after each of a LOGITS_PROMPT unit."""
    if units.next_token_ids is None:
        return {}
    found, at = {}, 0
    following = units.next_token_ids.tolist()
    for row in np.flatnonzero(units.logits & LOGITS_PROMPT).tolist():
        end = at + int(units.num_tokens[row])
        found[row] = tuple(TokenLogprobs(token_id, 0.0, 1) for token_id in following[at:end])
        at = end
    return found
