"""The paced device: real processes, real transport, and steps that take as long as a cost model says. No torch here.

The device answers at the modelled moment, and the rank's loop sleeps until then, so a few cores can stand for many
devices. `Answers` supplies the content: the demo network's own tokens, or a fixed sequence.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
from tokenizers import Tokenizer

from moestro.config.launch_spec import LaunchSpec
from moestro.core.load_figures import PaceCounts
from moestro.core.processes import as_exception
from moestro.core.request import ModelInfo, TokenLogprobs
from moestro.core.stages import NUM_PLANS
from moestro.core.views import true_rows
from moestro.core.work import (
    LOGITS_LAST,
    LOGITS_PROMPT,
    BlockMoves,
    Device,
    Forward,
    Keys,
    StepResult,
    Units,
    named_request_key,
)
from moestro.cost.gate import PopularityGate
from moestro.cost.gpus import A100, gpu_named, kv_blocks
from moestro.cost.model import Batch, CostModel, even_gating
from moestro.cost.networks import NetworkShape
from moestro.cost.priced_device import PricedStages, StageSetup, whole_setup
from moestro.cost.roofline import Roofline, RooflineSettings
from moestro.cost.settings import PACED_QLLM, PacedSettings
from moestro.cost.tables import QLLM, MeasuredCost, StagedEngine, in_4_bits, load_table
from moestro.engine.rank import Rank
from moestro.engine.sequences import SequenceTable
from moestro.errors import ConfigError, InvariantError
from moestro.model.settings import ModelSettings
from moestro.text.tokenizer_library import refuse_growth
from moestro.worker.rank_builder import make_preemptive_rank, make_rank

# Keys of requests by their ids, so that a request visits the same experts on every paced engine.

_NO_SEQUENCE = -1


class RequestKeys:
    """Makes the keys by which a paced device draws experts.

    Args:
        table: running sequences of the device's rank.
    """

    def __init__(self, table: SequenceTable) -> None:
        self._table = table
        # By slot: the sequence whose key was made last, and its key.
        self._serial = np.full(len(table.sequences), _NO_SEQUENCE, np.int64)
        self._key: Keys = np.zeros(len(table.sequences), np.uint64)

    def of(self, units: Units) -> Keys:
        """uint64[n], key of each unit's request."""
        for row in true_rows(self._serial.take(units.slot) != units.serial):
            slot = int(units.slot[row])
            self._key[slot] = named_request_key(self._table.at(slot).request.request_id)
            self._serial[slot] = units.serial[row]
        keys: Keys = self._key.take(units.slot)
        return keys


logger = logging.getLogger(__name__)

# Text that answers without arithmetic repeat; it begins with a space, so that its end and its beginning join.
WORDS = (
    " This answer is paced: each of its tokens took as long as a model says that it would take on another machine,"
    " and not one of them was computed."
)


_MAX_MODEL_LEN = 32_768  # tokens of the longest sequence, where the operator names none


class Answers(Protocol):
    """Supplies the result of an item when its modelled time has passed."""

    def of(self, item: Forward, now_ns: int) -> StepResult:
        """Compute the result of `item` at once."""
        ...


class TimedAnswers:
    """Keeps the results of items until their modelled time; what all paced devices have in common.

    Args:
        answers: supplier of the results.
        dilation: factor on modelled durations.
    """

    def __init__(self, answers: Answers, dilation: float = 1.0) -> None:
        self._answers, self.dilation = answers, dilation
        self._pending: deque[tuple[int, int, StepResult]] = deque()  # end and duration of an item, its result
        self._num_items = self._item_ns = self._late_ns = 0

    def answer_at(self, ready_ns: int, took_ns: int, item: Forward, now_ns: int) -> None:
        """Let `poll` return the result of `item`, which takes `took_ns`, at `ready_ns`, after those of earlier ones."""
        self._pending.append((ready_ns, took_ns, self._answer(item, now_ns)))

    def _answer(self, item: Forward, now_ns: int) -> StepResult:
        return self._answers.of(item, now_ns)

    def count(self, ready_ns: int, took_ns: int, now_ns: int) -> None:
        """Count an item of `took_ns` that ended at `ready_ns` and is taken in now."""
        self._num_items += 1
        self._item_ns += took_ns
        self._late_ns += now_ns - ready_ns

    def pace_counts(self) -> PaceCounts:
        """Return the counts of the items so far."""
        return PaceCounts(
            dilation=self.dilation, num_items=self._num_items, item_ns=self._item_ns, late_ns=self._late_ns
        )

    def move_blocks(self, moves: BlockMoves, now_ns: int) -> None:
        """Refuse: a paced device has no host memory, and `moestro serve` accepts no setting that asks for it."""
        raise InvariantError("a paced device cannot copy KV blocks")

    def poll(self, now_ns: int) -> list[StepResult]:
        """Implement `Device.poll`."""
        ready = []
        while self._pending and self._pending[0][0] <= now_ns:
            ready_ns, took_ns, result = self._pending.popleft()
            self.count(ready_ns, took_ns, now_ns)
            ready.append(result)
        return ready

    def ready_at_ns(self) -> int | None:
        """Implement `Device.ready_at_ns`."""
        return self._pending[0][0] if self._pending else None


class PacedDevice(TimedAnswers):
    """A `core.work.Device` on the wall clock.

    Args:
        cost: prices of the items; the rank's own code adds some 0.1 ms a step.
        answers: supplier of the results.
        dilation: factor on the prices.
        warning: function that returns a caveat about the prices so far, or None. The caveat is logged once.
    """

    def __init__(
        self,
        cost: CostModel,
        answers: Answers,
        dilation: float = 1.0,
        warning: Callable[[], str | None] = lambda: None,
    ) -> None:
        super().__init__(answers, dilation)
        self._cost = cost
        self._warning = warning
        self._has_warned = False
        self._free_at_ns = 0

    def launch(self, item: Forward, now_ns: int) -> None:
        """Implement `Device.launch`."""
        price_ns = round(self._cost.step_ns(Batch(item.units.start, item.units.num_tokens)) * self.dilation)
        if not self._has_warned and (text := self._warning()) is not None:
            logger.warning("%s", text)
            self._has_warned = True
        self._free_at_ns = max(now_ns, self._free_at_ns) + price_ns
        self.answer_at(self._free_at_ns, price_ns, item, now_ns)


class FixedAnswers:
    """Answers with a token that depends only on its position, with probability 1.

    A request ends at its `max_tokens`, which is all of its script.

    Args:
        words: token ids; position p gets the one at p modulo their number.
    """

    def __init__(self, words: Sequence[int]) -> None:
        self._words = np.array(words, np.int32)

    def of(self, item: Forward, now_ns: int) -> StepResult:
        """Implement `Answers.of`."""
        units = item.units
        samples = units.logits & LOGITS_LAST != 0
        words = self._words.take((units.start + units.num_tokens) % len(self._words))
        token_ids = np.where(samples, words, -1).astype(np.int32)
        wanted = np.flatnonzero(samples & (units.sampling["num_logprobs"] >= 0)).tolist()
        return StepResult(
            units.slot,
            token_ids,
            logprobs={row: TokenLogprobs(int(token_ids[row]), 0.0, 1) for row in wanted},
            prompt_logprobs=_certain_prompts(units),
        )


class NetworkAnswers:
    """Answers with tokens that a network on this machine computes; it must be faster than the modelled device.

    Args:
        device: a device that computes at once, on a CPU.
    """

    def __init__(self, device: Device) -> None:
        self._device = device

    def of(self, item: Forward, now_ns: int) -> StepResult:
        """Implement `Answers.of`."""
        self._device.launch(item, now_ns)
        (result,) = self._device.poll(now_ns)
        return result


def make_paced_rank(spec: LaunchSpec, paced: PacedSettings, answers: Answers, info: ModelInfo) -> Rank:
    """Build the rank that `spec` describes, in either mode.

    Raises:
        ConfigError: the GPU or the network is unknown.
    """
    if spec.stepping.mode == "fused":
        device = _paced_device(paced, answers)
        rank = make_rank(spec, device, info)
        rank.pace_counts = device.pace_counts
        return rank
    cost = stage_cost_of(paced)

    def answer(units: Units, now_ns: int) -> StepResult:
        return answers.of(Forward(units), now_ns)

    gate, num_tokens = paced_gate(cost, paced, spec.model.seed), NUM_PLANS * spec.scheduler.max_num_batched_tokens
    setup = dilated(whole_setup(cost, num_tokens, info.block_size, gate), paced)

    def keys_of(units: Units) -> Keys:  # of the rank's sequences; the rank, which needs the device, comes after it
        return keys.of(units)

    stages = PricedStages(cost, setup, answer, keys_of)
    rank = make_preemptive_rank(spec, stages, info)
    keys = RequestKeys(rank.scheduler.table)
    rank.pace_counts = lambda: pace_of_stages(stages, paced)
    return rank


def _paced_device(paced: PacedSettings, answers: Answers) -> PacedDevice:
    if paced.table is None:
        return PacedDevice(stage_cost_of(paced), answers, paced.pace_dilation)
    table = MeasuredCost(load_table(paced.table))
    return PacedDevice(table, answers, paced.pace_dilation, table.warning)


def dilated(setup: StageSetup, paced: PacedSettings) -> StageSetup:
    """Multiply the time of each item by the dilation."""
    return setup if paced.pace_dilation == 1 else replace(setup, factor=lambda: paced.pace_dilation)


def pace_of_stages(stages: PricedStages, paced: PacedSettings) -> PaceCounts:
    """Return the counts of a device that works in stages."""
    return PaceCounts(
        dilation=paced.pace_dilation,
        num_items=stages.num_items,
        item_ns=stages.busy_ns,
        late_ns=stages.late_ns,
    )


def stage_cost_of(paced: PacedSettings) -> Roofline | StagedEngine:
    """Make the prices of stages of a paced device that is no table.

    Raises:
        ConfigError: the GPU or the network is unknown.
    """
    network, by_rank, gating = paced.shape, None, None
    if paced.popularity is not None and network.experts is not None:
        by_rank = paced.popularity.by_rank(network.experts.num_experts)
        gating = even_gating(by_rank, network.experts.top_k)
    if paced.device == PACED_QLLM:
        return StagedEngine(QLLM, network, popularity=by_rank)
    return Roofline(RooflineSettings(network=network, gpu=gpu_named(paced.gpu), gating=gating))


def paced_gate(cost: Roofline | StagedEngine, paced: PacedSettings, seed: int) -> PopularityGate | None:
    """Make the gate that draws the experts of each token, the same in all modes. None means a dense network."""
    experts, popularity = cost.network.experts, cost.popularity
    if experts is None or popularity is None:
        return None
    if paced.popularity is not None:
        popularity = paced.popularity.by_layer(cost.network.num_layers, experts.num_experts)
    return PopularityGate(popularity, experts.top_k, seed)


def num_blocks_of(paced: PacedSettings, model: ModelSettings, num_ep_ranks: int = 1) -> int | None:
    """KV blocks of the modelled device; None with a table, where the computing network decides.

    Args:
        num_ep_ranks: devices that share the routed experts.

    Raises:
        ConfigError: the network does not fit the GPU.
    """
    if model.num_gpu_blocks_override is not None or paced.table is not None:
        return model.num_gpu_blocks_override
    network = paced.shape
    if model.kv_cache_memory_bytes is not None:
        return model.kv_cache_memory_bytes // (network.kv_bytes_per_token * model.block_size)
    if paced.device == PACED_QLLM:
        return kv_blocks(
            in_4_bits(network), A100, model.block_size, gpu_memory_utilization=model.gpu_memory_utilization
        )
    return kv_blocks(
        network,
        gpu_named(paced.gpu),
        model.block_size,
        gpu_memory_utilization=model.gpu_memory_utilization,
        num_ep_ranks=num_ep_ranks,
    )


def paced_info(paced: PacedSettings, model: ModelSettings, vocab_size: int, num_blocks: int) -> ModelInfo:
    """Model information where no network is loaded.

    Args:
        vocab_size: vocabulary of the tokenizer for which the answers are made. Clients may send every id of the
            tokenizer and every id of the modelled network.
        num_blocks: KV blocks of the modelled device.
    """
    network = paced.shape
    fitting = min(_MAX_MODEL_LEN, num_blocks * model.block_size)
    return ModelInfo(
        model_id=paced.network,
        max_model_len=model.max_model_len or fitting,
        vocab_size=max(vocab_size, network.vocab_size),
        eos_token_ids=(),
        block_size=model.block_size,
        num_blocks=num_blocks,
        num_parameters=num_parameters(network),
        model_type=paced.network,
        dtype="no arithmetic",
        device=paced.device,
        num_layers=network.num_layers,
        num_experts=network.experts.num_experts if network.experts else 0,
        num_experts_per_token=network.experts.top_k if network.experts else 0,
        pace_dilation=paced.pace_dilation,
        notes=(*paced_notes(paced), "Answers repeat fixed words."),
        has_logits=False,
        is_exact=True,
    )


PACED_NOTE = "Evidence is paced: steps take as long as a cost model says, and nothing here is measured on that device."


def paced_notes(paced: PacedSettings) -> tuple[str, ...]:
    """Notes for the operator about the times of a paced device."""
    if paced.pace_dilation == 1:
        return (PACED_NOTE,)
    factor = f"{paced.pace_dilation:g}"
    dilation_note = (
        f"All times are dilated: send requests at 1/{factor} of the modelled rate, divide durations by {factor}, and"
        f" multiply rates by {factor}."
    )
    return PACED_NOTE, dilation_note


def num_parameters(network: NetworkShape) -> int:
    """Number of weights of all kinds, without norms."""
    plain = replace(network.experts, bytes_per_weight=2.0) if network.experts else None
    return round(replace(network, bytes_per_weight=2.0, experts=plain).weight_bytes() / 2)


def read_words(tokenizer: Path) -> tuple[list[int], int]:
    """`WORDS` as ordinary token ids, none of them special, and the number of ids.

    Args:
        tokenizer: directory with tokenizer.json.

    Raises:
        ConfigError: tokenizer.json is missing, unreadable or refused by a trial, or has no token for any of the words.
    """
    path = str(tokenizer / "tokenizer.json")
    if Path(path).is_file():
        refuse_growth(tokenizer, lambda: Tokenizer.from_file(path))
    try:
        backend = Tokenizer.from_file(path)
        encoded: list[int] = backend.encode(WORDS, add_special_tokens=False).ids
    except BaseException as error:  # the library raises bare exceptions, and panics
        cause = as_exception(error)
        raise ConfigError(f"cannot read tokenizer.json in {tokenizer}: {cause}; name another by --tokenizer") from error
    special = {token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special}
    words = [token_id for token_id in encoded if token_id not in special]
    if not words:
        raise ConfigError(f"the tokenizer in {tokenizer} has no words for English: name another by --tokenizer")
    return words, max(backend.get_vocab(with_added_tokens=True).values()) + 1


def _certain_prompts(units: Units) -> dict[int, tuple[TokenLogprobs, ...]]:
    """An entry for the token after each token of a LOGITS_PROMPT unit."""
    if units.next_token_ids is None:
        return {}
    found, at = {}, 0
    following = units.next_token_ids.tolist()
    for row in np.flatnonzero(units.logits & LOGITS_PROMPT).tolist():
        end = at + int(units.num_tokens[row])
        found[row] = tuple(TokenLogprobs(token_id, 0.0, 1) for token_id in following[at:end])
        at = end
    return found
