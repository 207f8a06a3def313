"""Loads of experts for `placement.py`: seeded generators, and the recorded choices of GPT-OSS-20B."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from moestro.core.experts.expert_load import ExpertLoad
from moestro.core.experts.expert_table import ExpertTable
from moestro.cost.gpus import H100
from moestro.cost.links import INFINIBAND_NDR, NVSWITCH_H100
from moestro.placement.contract import Devices, PlaceLimits, PlacePrices, PlaceView, even_devices
from moestro.workload.experts.expert_profile import RoutingTrace, read_routing

JITTER = 0.15  # standard deviation of the logarithm of a load about Zipf's law
ROWS_PER_SOURCE = 16_384  # rows that a source sends in a layer and step: a prefill of 2,048 tokens, 8 experts each
WINDOW_STEPS = 1000  # vLLM's window_size
NEXT_SIGMA = 0.10  # of the noise between a window and the next one
NUM_CLUSTERS, OWN_SHARE = 4, 0.6  # kinds of tasks, and the part of a kind's popularity that is its own


@dataclass(frozen=True, kw_only=True)
class Model:
    """Sizes that decide prices and loads.

    Attributes:
        hidden, width: Sizes of a token and of an expert.
        weight_bytes: Bytes of one weight of an expert.
        num_groups: Groups of experts that the gate chooses first.
    """

    num_layers: int
    num_experts: int
    hidden: int
    width: int
    weight_bytes: float
    num_groups: int = 1

    @property
    def prices(self) -> PlacePrices:
        """Prices on H100 with NVSwitch and a 400 Gb/s port each: peaks times the fractions that `cost` has fitted."""
        expert_bytes = round(3 * self.hidden * self.width * self.weight_bytes)
        row_bytes = 1.5 * self.hidden  # the mean of a row in FP8 and of its answer in bfloat16
        ways = (H100.memory_bytes_per_s / 2, NVSWITCH_H100.bytes_per_s, INFINIBAND_NDR.bytes_per_s)
        return PlacePrices(
            token_s=6 * self.hidden * self.width / (H100.bf16_flops_per_s * H100.expert_compute),
            expert_s=expert_bytes / (H100.memory_bytes_per_s * H100.expert_memory),
            row_s=(0.0, row_bytes / ways[1], row_bytes / ways[2]),
            expert_bytes=expert_bytes,
            move_bytes_per_s=ways,
        )


DEEPSEEK_V3 = Model(num_layers=58, num_experts=256, hidden=7168, width=2048, weight_bytes=1, num_groups=8)
QWEN3_30B = Model(num_layers=48, num_experts=128, hidden=2048, width=768, weight_bytes=2)
GPT_OSS_20B = Model(num_layers=24, num_experts=32, hidden=2880, width=2880, weight_bytes=0.53)  # MXFP4 with scales


@dataclass(frozen=True)
class Bed:
    """A model on some devices.

    Attributes:
        num_slots: Slots of each device.
        rows_per_source: Rows that each device sends to experts in a layer and step. Few rows make the reading of
            weights dearer than the work for tokens, and then balance matters less.
    """

    model: Model
    num_devices: int
    num_slots: int
    num_nodes: int
    rows_per_source: int = ROWS_PER_SOURCE

    @property
    def name(self) -> str:
        model = self.model
        return (
            f"{model.num_layers}x{model.num_experts} on {self.num_devices}, {self.num_devices * self.num_slots} slots"
        )

    @property
    def devices(self) -> Devices:
        return even_devices(self.num_devices, self.num_slots, self.num_nodes)

    def first_table(self) -> ExpertTable:
        """Place experts as vLLM does at its start: in order, then the first ones again in the redundant slots."""
        experts = np.arange(self.num_devices * self.num_slots, dtype=np.int32) % self.model.num_experts
        slots = experts.reshape(self.num_devices, 1, self.num_slots)
        logical_of = np.repeat(slots, self.model.num_layers, axis=1)
        return ExpertTable(0, logical_of, self.model.num_experts, np.ones(self.num_devices, np.bool_))

    def view(self, load: ExpertLoad, table: ExpertTable | None = None) -> PlaceView:
        """Show a load to a policy; None means the table of the start."""
        return PlaceView(
            load,
            self.first_table() if table is None else table,
            self.devices,
            self.model.prices,
            PlaceLimits(),
            self.model.num_groups,
        )


def load_of(tokens: np.ndarray) -> ExpertLoad:
    """Make a load of tokens per step, float64[sources, layers, experts]; steps are Poisson."""
    total = tokens.sum(axis=0)
    return ExpertLoad(tokens, total, 1 - np.exp(-total), WINDOW_STEPS)


def from_every_source(popularity: np.ndarray, bed: Bed) -> ExpertLoad:
    """Let all sources send the same mix, by popularity float64[layers, experts]."""
    share = popularity / popularity.sum(axis=1, keepdims=True)
    return load_of(np.repeat(bed.rows_per_source * share[None], bed.num_devices, axis=0))


def zipf(model: Model, exponent: float, rng: np.random.Generator) -> np.ndarray:
    """Draw float64[layers, experts]: Zipf's law with jitter, other hot experts in each layer."""
    ranks = np.tile(np.arange(1.0, model.num_experts + 1), (model.num_layers, 1))
    return rng.permuted(ranks, axis=1) ** -exponent * rng.lognormal(0, JITTER, ranks.shape)


def drifted(popularity: np.ndarray, sigma: float, swapped: float, rng: np.random.Generator) -> np.ndarray:
    """Multiply with lognormal noise, and let a share `swapped` of each layer's experts exchange their popularity."""
    later = popularity * rng.lognormal(0, sigma, popularity.shape)
    num = round(swapped * popularity.shape[1])
    if num > 1:
        for layer in later:
            chosen = rng.choice(len(layer), num, replace=False)
            layer[chosen] = layer[np.roll(chosen, 1)]
    return later


def with_noise(load: ExpertLoad, rng: np.random.Generator) -> ExpertLoad:
    """The next window: the same noise for all sources."""
    return load_of(load.tokens * rng.lognormal(0, NEXT_SIGMA, load.total.shape))


def from_clusters(bed: Bed, sticky: float, rng: np.random.Generator) -> ExpertLoad:
    """Draw a load in which the sources of node n prefer tasks of kind n modulo 4.

    Args:
        sticky: Share of a node's tokens whose task is the node's own; the tasks of the others are drawn evenly.
    """
    common = zipf(bed.model, 0.6, rng)
    kinds = [
        OWN_SHARE * own / own.sum(axis=1, keepdims=True) + (1 - OWN_SHARE) * common / common.sum(axis=1, keepdims=True)
        for own in (zipf(bed.model, 0.6, rng) for _ in range(NUM_CLUSTERS))
    ]
    mean = np.mean(kinds, axis=0)
    mixes = [sticky * kinds[node % NUM_CLUSTERS] + (1 - sticky) * mean for node in bed.devices.node_of.tolist()]
    return load_of(bed.rows_per_source * np.stack(mixes))


def kill(view: PlaceView, device: int) -> PlaceView:
    """Show the same load after a device died: its slots and its source are gone, and the table is still the old one."""
    is_alive = view.devices.is_alive.copy()
    is_alive[device] = False
    tokens = view.load.tokens.copy()
    tokens[view.devices.source_on == device] = 0.0
    load = replace(view.load, tokens=tokens)
    return replace(view, load=load, devices=replace(view.devices, is_alive=is_alive))


# --- recorded choices -------------------------------------------------------------------------------------------------

MIN_TOKENS = 5_000  # a domain with fewer is left out


def read_trace(folder: Path) -> RoutingTrace:
    return read_routing(folder / "gptoss20b_routing_experts_u8.npy.zst", folder / "gptoss20b_routing_index.jsonl.zst")


def domains(trace: RoutingTrace) -> list[str]:
    """Benchmarks with enough tokens, in order of the trace."""
    num_tokens: dict[str, int] = {}
    for answer in trace.generations:
        num_tokens[answer.dataset] = num_tokens.get(answer.dataset, 0) + answer.num_tokens
    return [name for name, num in num_tokens.items() if num >= MIN_TOKENS]


def windows(trace: RoutingTrace, domain: str, bed: Bed, seed: int) -> Iterator[ExpertLoad]:
    """Yield two windows of a domain: answers are dealt to both by a seed, and within each to sources in turn."""
    answers = [answer for answer in trace.generations if answer.dataset == domain]
    order = np.random.default_rng(seed).permutation(len(answers))
    for half in np.array_split(order, 2):
        counts = np.zeros((bed.num_devices, bed.model.num_layers, bed.model.num_experts))
        for turn, index in enumerate(half.tolist()):
            answer = answers[index]
            part = slice(answer.offset, answer.offset + answer.num_tokens)
            counts[turn % bed.num_devices] += trace.counts(bed.model.num_experts, part)
        yield load_of(counts * (bed.rows_per_source * bed.num_devices / counts[:, 0].sum()))
