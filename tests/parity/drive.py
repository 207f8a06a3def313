"""Random histories on a torch device: who is in a step, in which chunks, in which blocks. And what came of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from moestro.core.work import LOGITS_LAST, LOGITS_NONE, LOGITS_PROMPT, SAMPLING_ROW, Forward, StepResult, Units
from moestro.model.device import TorchDevice
from moestro.model.network import Network
from moestro.model.step import PagedStep

BLOCK_SIZE, NUM_BLOCKS = 4, 96


class WaitingDevice(TorchDevice):
    """Waits in `poll` until a step is done, as a CPU does, so that a test with virtual time may count its polls."""

    def poll(self, now_ns: int) -> list[StepResult]:
        results = super().poll(now_ns)
        while self._running and not results:
            results = super().poll(now_ns)
        return results


class RecordingNetwork(Network):
    """Keeps the logits of the last step and all counts; may be set to get positions wrong."""

    position_error = 0
    total_counts: torch.Tensor | int = 0

    def logits(self, step: PagedStep) -> torch.Tensor:
        late = np.repeat(step.units.start > 0, step.units.num_tokens)
        step.position_ids = step.position_ids + self.position_error * step.upload(late)[None]
        self.last_step, self.last_logits = step, super().logits(step)
        self.total_counts = self.total_counts + (0 if self.routing is None else self.routing.counts)
        return self.last_logits


@dataclass
class Driven:
    """One sequence: its tokens so far, and our logits by position."""

    tokens: list[int]
    num_prompt: int
    blocks: list[int]
    num_computed: int = 0
    logits: dict[int, torch.Tensor] = field(default_factory=dict)
    prompt_logprobs: dict[int, object] = field(default_factory=dict)


def recording(network: Network) -> RecordingNetwork:
    network.__class__ = RecordingNetwork  # in place: a network that is packed cannot be built again from its model
    return network


def make_device(network: Network, num_blocks: int = NUM_BLOCKS, num_host_blocks: int = 0) -> TorchDevice:
    pools = network.probe(BLOCK_SIZE)[0].allocate(num_blocks)
    pools.allocate_host(num_host_blocks)
    return WaitingDevice(network, pools)


def greedy(num: int = 1, **columns: object) -> np.ndarray:
    rows = np.zeros(num, SAMPLING_ROW)
    rows["top_p"], rows["repetition_penalty"], rows["num_logprobs"], rows["num_prompt_logprobs"] = 1, 1, -1, -1
    for name, value in columns.items():
        rows[name] = value
    return rows


def make_units(parts: list[tuple[int, list[int]]], tables: np.ndarray, **columns: object) -> Units:
    """Units from (first position, token ids) that want their last logits, unless `columns` say otherwise."""
    start = np.array([first for first, _ in parts], np.int32)
    return Units(
        **{
            "slot": np.arange(len(parts), dtype=np.int32),
            "serial": np.arange(len(parts)),
            "service_class": np.zeros(len(parts), np.uint8),
            "start": start,
            "num_tokens": np.array([len(tokens) for _, tokens in parts], np.int32),
            "write_start": start,
            "logits": np.full(len(parts), LOGITS_LAST, np.uint8),
            "block_tables": np.asarray(tables, np.int32),
            "sampling": greedy(len(parts)),
            "token_ids": np.array([token for _, tokens in parts for token in tokens], np.int32),
            **columns,
        }
    )


def run(device: TorchDevice, units: Units) -> StepResult:
    device.launch(Forward(units), 0)
    while not (results := device.poll(0)):
        pass
    (result,) = results
    return result


def drive(device: TorchDevice, prompts: list[list[int]], num_new: int, rng: np.random.Generator) -> list[Driven]:
    """Generate greedily under a random schedule.

    Chunks of 1-9 tokens, random subsets in random order, prefill and decode mixed, blocks in random order, and units
    that want all logits, the last or none. `device.network` must record.
    """
    sequences = admit(prompts, num_new, rng)
    while going := [s for s in sequences if len(s.tokens) < s.num_prompt + num_new]:
        chosen = [going[i] for i in rng.permutation(len(going))[: rng.integers(1, len(going) + 1)]]
        step(device, chosen, rng)
    return sequences


def admit(prompts: list[list[int]], num_new: int, rng: np.random.Generator) -> list[Driven]:
    """Sequences in random blocks."""
    blocks = rng.permutation(NUM_BLOCKS).tolist()
    sequences = []
    for prompt in prompts:
        needed = -(-(len(prompt) + num_new) // BLOCK_SIZE)
        sequences.append(Driven(list(prompt), len(prompt), [blocks.pop() for _ in range(needed)]))
    return sequences


def step(device: TorchDevice, sequences: list[Driven], rng: np.random.Generator) -> None:
    ends = [min(len(s.tokens), s.num_computed + int(rng.integers(1, 10))) for s in sequences]
    last = np.array([LOGITS_LAST * (end == len(s.tokens)) for s, end in zip(sequences, ends, strict=True)])
    every = np.array([LOGITS_PROMPT * int(rng.integers(2)) for _ in sequences])
    parts = [(s.num_computed, s.tokens[s.num_computed : end]) for s, end in zip(sequences, ends, strict=True)]
    following = [
        [*s.tokens, 0][s.num_computed + 1 : end + 1]
        for s, end, want in zip(sequences, ends, every, strict=True)
        if want != LOGITS_NONE
    ]
    tables = rng.integers(NUM_BLOCKS, size=(len(sequences), max(len(s.blocks) for s in sequences)))
    for row, sequence in zip(tables, sequences, strict=True):
        row[: len(sequence.blocks)] = sequence.blocks
    units = make_units(
        parts,
        tables,
        logits=(last + every).astype(np.uint8),
        next_token_ids=np.array([token for tokens in following for token in tokens], np.int32) if following else None,
    )
    result = run(device, units)
    record(device.network, sequences)
    for index, (sequence, end) in enumerate(zip(sequences, ends, strict=True)):
        for offset, entry in enumerate(result.prompt_logprobs.get(index, ())):
            sequence.prompt_logprobs[sequence.num_computed + offset] = entry
        sequence.num_computed = end
        assert (result.token_ids[index] >= 0) == bool(last[index])
        if last[index]:
            sequence.tokens.append(int(result.token_ids[index]))


def record(network: RecordingNetwork, sequences: list[Driven]) -> None:
    unit_of_row = np.repeat(np.arange(len(sequences)), network.last_step.num_tokens_of)
    for row, logits in zip(network.last_step.logit_rows, network.last_logits.cpu(), strict=True):
        sequences[unit_of_row[row]].logits[int(network.last_step.positions[row])] = logits


@dataclass(frozen=True)
class Difference:
    """How far our logits are from the oracle's, and how often its greedy token differs from ours beyond a tie."""

    largest: float
    wrong_tokens: int
    num_rows: int


@torch.inference_mode()
def compare(sequences: list[Driven], oracle, name: str = "") -> Difference:
    """Against one plain pass of the oracle over each whole sequence."""
    largest, wrong, rows = 0.0, 0, 0
    for sequence in sequences:
        theirs = oracle(input_ids=torch.tensor([sequence.tokens]), use_cache=False).logits[0]
        for position, ours in sequence.logits.items():
            largest = max(largest, float((ours - theirs[position]).abs().max()))
            rows += 1
        for position in range(sequence.num_prompt, len(sequence.tokens)):
            first, second = theirs[position - 1].topk(2).values.tolist()
            if int(theirs[position - 1].argmax()) != sequence.tokens[position]:
                if name:
                    print(f"{name}: position {position}: top-2 gap {first - second:.2e}")
                wrong += first - second >= 1e-5
    return Difference(largest, wrong, rows)
