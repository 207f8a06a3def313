"""A loaded network that runs steps: transformers' own definition with Moestro's attention and experts inside."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.core.views import LS
from moestro.core.work import LOGITS_LAST, LOGITS_PROMPT, SAMPLING_ROW, Int32s, Units
from moestro.errors import UnsupportedModelError
from moestro.files.config_fields import layer_of_name
from moestro.model.attention import STEP_ARGUMENT
from moestro.model.experts.expert_slots import keep_experts, pack_experts
from moestro.model.experts.gate_override import GateOverride, GateShape
from moestro.model.experts.routed import Routing, is_experts, tag_experts
from moestro.model.kernels.exchange import KernelExchange
from moestro.model.kernels.library import KernelBuild
from moestro.model.kernels.packing import can_pack, leave_files, pack_linears
from moestro.model.pools import KVPools
from moestro.model.sampler import find_peaks
from moestro.model.step import ExpertVisitCounter, PagedStep
from moestro.model.tensors import SCALES

logger = logging.getLogger(__name__)

# Weights that change their layout between two steps while the network serves: about 20 ms of a core.
_BYTES_A_STEP = 16 << 20


class ModuleExchange(Protocol):
    """An exchange of a network's modules for own kernels.

    Attributes:
        kept: number of modules of each class whose results may depend on the batch, because no kernel computes them.
    """

    kept: Counter[str]

    @property
    def note(self) -> str:
        """A sentence for the operator."""
        ...

    def exchange_modules(self, model: Any, routing: Routing | None) -> Iterator[int]:
        """Exchange everything but routed experts. Yields the bytes of weights of each module after its exchange."""
        ...

    def exchange_experts(self, modules: list[tuple[int, Any]]) -> Iterator[int]:
        """Exchange routed experts. `modules`: as `Network.experts`. Yields as `exchange_modules`."""
        ...


class Network:
    """Runs steps on a transformers model.

    Args:
        model: a loaded model in evaluation mode, with the attention and experts functions of this room.
        device: device of its weights. None means where they are.

    Attributes:
        config: text part of the model's config.
        device, dtype: device and dtype of its weights.
        num_parameters: number of parameters, counting tied ones once and scales of blocks not at all.
        num_experts, bytes_per_expert: number in the layer that has most, and size of the largest; 0 for a dense model.
        layer_bytes: for each layer, bytes of its weights without routed experts.
        num_slots: number of slots that each layer with experts has here; `num_experts` before `keep_experts`.
        routing: shared state of its experts; None for a dense model.
        override: replacement of its gates' choices; None means that the gates choose.
        experts: (layer, experts module), ascending.
        graph_bytes: memory that recorded steps will take on an accelerator.
        exchange: exchange of its modules for own kernels; None while torch computes all.
        on_exchanged: called when all modules are exchanged while the network serves: KV of before is of other kernels.
    """

    def __init__(self, model: Any, device: torch.device | None = None) -> None:
        self.model = model
        self.config = model.config.get_text_config()
        self.num_layers: int = self.config.num_hidden_layers
        self.device: torch.device = device or model.device
        self.dtype: torch.dtype = model.dtype
        self.num_parameters = sum(each.numel() for name, each in model.named_parameters() if not name.endswith(SCALES))
        self.override: GateOverride | None = None
        self.experts = find_experts(model, self.num_layers)
        self.bytes_per_expert = max((_bytes_per_expert(module) for _, module in self.experts), default=0)
        self.num_experts = max((int(module.num_experts) for _, module in self.experts), default=0)
        self.num_slots = self.num_experts
        self.layer_bytes = _bytes_of_layers(model, self.num_layers, self.experts)
        self.graph_bytes = 0
        self.exchange: ModuleExchange | None = None
        self._awaited: KernelBuild | None = None
        self._exchanging: Iterator[int] | None = None
        self.on_exchanged: Callable[[], None] = lambda: None
        self.routing = Routing(self.num_layers, self.num_experts, self.device) if self.experts else None
        if self.routing is not None:
            tag_experts(self.experts, self.routing, self.dtype)

    def keep_experts(self, logical_of: Int32s) -> None:
        """Drop the weights of all experts but those of a worker's slots; to be called once, before `pack_experts`.

        Args:
            logical_of: int32[layers, slots], logical expert in each slot; EMPTY means none.
        """
        self.num_slots = logical_of.shape[1]
        for layer, module in self.experts:
            # A table has the experts of the layer that has most.
            keep_experts(module, np.where(logical_of[layer] < module.num_experts, logical_of[layer], EMPTY))

    def adopt_experts(self, layer: int, loaded: nn.Module, slots: Int32s) -> None:
        """Take the experts of a worker's slots from a module of another network, and pack them.

        Args:
            layer: a layer whose experts module is on the meta device.
            loaded: the same module with its weights, which are moved.
            slots: int32[slots], logical expert in each slot; EMPTY means none.
        """
        module = dict(self.experts)[layer]
        for name, parameter in loaded.named_parameters():
            parent = module.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], parameter)
        self.num_slots = len(slots)
        keep_experts(module, np.where(slots < module.num_experts, slots, EMPTY))
        module.to(self.device)
        self._pack_experts([(layer, module)])

    def drop_all_but_experts(self) -> None:
        """Drop embeddings, attention, norms, gates, shared experts, dense layers and the head.

        Only the modules in `experts` remain; no step can run.
        """
        self.model = None

    @property
    def is_batch_invariant(self) -> bool:
        """Whether own kernels compute everything that may round by the batch, from the first step on."""
        return self.exchange is not None and self._awaited is None and not self.exchange.kept

    def use_kernels(self, exchange: ModuleExchange) -> None:
        """Let `pack` exchange modules for own kernels. The network has run a step."""
        self.exchange = exchange

    def await_kernels(self, build: KernelBuild) -> None:
        """Let `adopt_kernels` exchange modules for own kernels when a search has found them."""
        self._awaited = build

    def pack(self) -> None:
        """Convert the weights to the layout of the CPU's kernels, where such kernels exist.

        Afterwards only Moestro's functions can run the network, because transformers' experts would miss their weights.
        """
        self.pack_linears()
        self.pack_experts()

    @torch.inference_mode()
    def pack_linears(self) -> None:
        """Do the part of `pack` that concerns everything but routed experts."""
        if self.device.type == "cpu":
            packs = self.exchange is not None or self._awaited is not None or can_pack(self.device, self.dtype)
            if packs or self.experts:  # else the files hold all weights, which several engines share
                leave_files(self.model, packs_linears=packs)
        if self.exchange is not None:
            for _ in self.exchange.exchange_modules(self.model, self.routing):
                pass
        if can_pack(self.device, self.dtype):
            pack_linears(self.model)

    def pack_experts(self) -> None:
        """Do the part of `pack` that concerns routed experts."""
        self._pack_experts(self.experts)

    @torch.inference_mode()
    def _pack_experts(self, modules: list[tuple[int, Any]]) -> None:
        if self.exchange is not None:
            for _ in self.exchange.exchange_experts(modules):
                pass
        elif can_pack(self.device, self.dtype):
            for _, module in modules:
                pack_experts(module)

    def finish_kernels(self) -> None:
        """Wait for awaited kernels and exchange all modules now, so that all steps from here on compute alike."""
        if self._awaited is not None:
            self._awaited.wait()
        while self._awaited is not None:
            self.adopt_kernels()

    @torch.inference_mode()
    def adopt_kernels(self) -> None:
        """Exchange some modules for own kernels that have arrived while the network serves. Called between two steps.

        Each exchanged module computes what it did but for rounding, so that steps may run while others still follow.
        """
        if self._awaited is None or not self._awaited.is_over:
            return
        library = self._awaited.library
        if library is None:
            logger.warning("CPU kernels: torch's stay, which are slower than Moestro's own: %s.", self._awaited.failure)
            self._awaited = None
            return
        if self.exchange is None or self._exchanging is None:
            self.exchange = KernelExchange(library)
            has_layers = self.model is not None
            parts = self.exchange.exchange_modules(self.model, self.routing) if has_layers else ()
            self._exchanging = chain(parts, self.exchange.exchange_experts(self.experts))
        num_bytes = 0
        for size in self._exchanging:
            num_bytes += size
            if num_bytes >= _BYTES_A_STEP:
                return
        self._awaited = self._exchanging = None
        self.on_exchanged()
        logger.info("%s The prefix cache begins anew.", self.exchange.note)

    def sample_choices(self, interval: int) -> None:
        """Keep the choices of some tokens in one step of `interval`, for `StepResult.expert_choices`."""
        if self.routing is not None:
            self.routing.sample_interval = interval

    def count_visits(self, num_workers: int) -> None:
        """Count the workers that compute each unit's experts, for `StepResult.visits`."""
        if self.routing is not None:
            self.routing.visits = ExpertVisitCounter(self.num_layers, num_workers)

    @torch.inference_mode()
    def logits(self, step: PagedStep) -> Tensor:
        """Run one step: write its K and V, count its experts' tokens, and return the requested logits.

        Returns:
            [requested rows, vocabulary], in the order of `step.logit_rows`, in at least float32.

        Raises:
            UnsupportedModelError: the network does something that a paged step does not support.
        """
        logits = self.stored_logits(step)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    @torch.inference_mode()
    def stored_logits(self, step: PagedStep) -> Tensor:
        """Do what `logits` does, and return the logits in the network's dtype."""
        if self.routing is not None:
            self.routing.begin(self.choose_experts(step))
            if self.routing.visits is not None:
                self.routing.visits.begin(step)
        answer = self.model(
            input_ids=step.input_ids,
            position_ids=step.position_ids,
            use_cache=False,
            logits_to_keep=step.logit_row_ids,
            **{STEP_ARGUMENT: step},
        )
        logits: Tensor = answer.logits[0]
        if len(logits) != len(step.logit_row_ids):
            raise UnsupportedModelError(f"{type(self.model).__name__} cannot compute logits of chosen tokens alone.")
        return logits

    def probe(self, block_size: int, num_tokens: int = 1) -> tuple[KVPools, int]:
        """Run a prompt to learn the shapes of K and V, and how many experts a token visits (0 for a dense model).

        Args:
            num_tokens: tokens of the prompt, at most those of one block.

        Raises:
            UnsupportedModelError: a layer keeps no K and V, or the logits are not finite.
        """
        pools = KVPools(1, block_size)
        logits = self.logits(PagedStep(_probe_units(num_tokens, self.config.vocab_size), pools, self.device))
        if pools.layers != list(range(self.num_layers)):
            silent = sorted(set(range(self.num_layers)) - set(pools.layers))
            raise UnsupportedModelError(f"{type(self.model).__name__}: layers {silent} write no K and V of their own.")
        if not find_peaks(logits).is_finite.all():
            raise UnsupportedModelError(self._why_not_finite())
        if self.routing is None:
            return pools, 0
        return pools, int(self.routing.counts.sum(1).max()) // num_tokens

    def _why_not_finite(self) -> str:
        """Name a parameter at fault; only a network that is refused pays for this pass over all weights."""
        for name, parameter in self.model.named_parameters():
            if not parameter.isfinite().all():
                return f"The weights hold NaN or infinity in {name}, and so do the logits: fetch the checkpoint again."
        return (
            "The logits of the first tokens are NaN or infinite, though all weights are finite: check the numbers of"
            f" config.json, or give --dtype float32 (it is {str(self.dtype).removeprefix('torch.')})."
        )

    def gate_shape(self, num_chosen: int) -> GateShape:
        """Shape of the gates, for an override."""
        layers = tuple(layer for layer, _ in self.experts)
        return GateShape(layers=layers, num_experts=self.num_experts, num_chosen=num_chosen)

    def choose_experts(self, step: PagedStep) -> Tensor | None:
        """int64[layers with experts, tokens, k], the override's choice; None means that the gates choose."""
        if self.override is None:
            return None
        return step.upload(self.override.choose(step.positions, step.token_ids))


def find_experts(model: nn.Module, num_layers: int) -> list[tuple[int, Any]]:
    """Find (layer, experts module), ascending."""
    found = []
    for name, module in model.named_modules():
        if is_experts(module):
            layer = layer_of_name(name)
            assert layer is not None, "an experts module outside of the layers"
            found.append((layer, module))
    # Layers that do not run may follow those that do: heads for multi-token prediction.
    return sorted((pair for pair in found if pair[0] < num_layers), key=lambda pair: pair[0])


def _bytes_of(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def _bytes_per_expert(module: Any) -> int:
    return _bytes_of(module) // int(module.num_experts)


def _bytes_of_layers(model: Any, num_layers: int, experts: list[tuple[int, nn.Module]]) -> tuple[int, ...]:
    num_bytes = [0] * num_layers
    for name, parameter in model.get_decoder().named_parameters():
        layer = layer_of_name(name)
        if layer is not None and layer < num_layers:
            num_bytes[layer] += parameter.numel() * parameter.element_size()
    for layer, module in experts:
        num_bytes[layer] -= _bytes_of(module)
    return tuple(num_bytes)


def _probe_units(num_tokens: int, vocab_size: int) -> Units:
    """One prompt of tokens from all over the vocabulary; the logits of each are wanted."""
    one = np.ones(1, np.int32)
    return Units(
        slot=np.zeros(1, np.int64),
        serial=np.zeros(1, np.int64),
        service_class=np.full(1, LS, np.uint8),
        start=0 * one,
        num_tokens=num_tokens * one,
        write_start=0 * one,
        logits=np.full(1, LOGITS_LAST | LOGITS_PROMPT, np.uint8),
        block_tables=np.zeros((1, 1), np.int32),
        sampling=np.zeros(1, SAMPLING_ROW),
        token_ids=np.linspace(0, vocab_size - 1, num_tokens).astype(np.int32),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkerShare:
    """Share of a network that a worker of a group keeps, and its room for tokens of other workers.

    Attributes:
        worker: number of the worker in the table.
        make_table: function of (layers, experts of a layer) that returns the placement of the experts. A worker
            without experts has none in its row of the table.
        keeps_empty_slots: whether a worker whose slots are all empty keeps them, for experts that come later.
        num_remote_places: tokens of other workers that may be among this worker's experts at once; 0 where experts are
            exchanged in whole steps.
    """

    worker: int
    make_table: Callable[[int, int], ExpertTable]
    num_remote_places: int = 0
    keeps_empty_slots: bool = False

    def slots(self, network: Network) -> Int32s:
        """int32[layers, slots], logical expert in each of the worker's slots; EMPTY means none."""
        table = self.make_table(network.num_layers, network.num_experts)
        logical_of: Int32s = table.logical_of[self.worker]
        return logical_of if self.keeps_empty_slots or (logical_of != EMPTY).any() else logical_of[:, :0]

    def cut(self, network: Network, *, keeps_attention: bool = True) -> None:
        """Drop what the worker does not own. The network's linear layers may be packed, its experts may not.

        Args:
            network: a network with all weights.
            keeps_attention: whether the worker keeps everything but the routed experts of others.
        """
        network.keep_experts(self.slots(network))
        if not keeps_attention:
            network.drop_all_but_experts()
        gc.collect()  # modules of transformers may refer to each other
