"""Measures the host's time for the layers of a decode in mode `preemptive`: launched one by one, and replayed.

    python bench/micro/layer_graphs.py --json bench/results/micro/layer_graphs.json

The network has the width of Qwen3-30B-A3B and random weights. Both ways compute the same step of one-token units, up to
the sampler, in turn.

- `launched_host_ms`, `replayed_host_ms`: until the host has queued all layers, without a wait for the device.
- `launched_ms`, `replayed_ms`, `equal_bits`: on a GPU, until the device is done, and whether both ways leave the same
  bits in the residual stream and in K and V.

Without a GPU, launches and replays do nothing: what remains is the thread's time for the Python around them. Triton's
own part of a launch, which a replay saves too, is not in it.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moestro.config.run_record import run_record
from moestro.core.stages import Merges, Passage, StageShape
from moestro.core.views import LS
from moestro.core.work import LOGITS_LAST, SAMPLING_ROW, Units
from moestro.model import network as network_module
from moestro.model.cuda import exchange, layer_graphs
from moestro.model.cuda.exchange import CudaExchange
from moestro.model.cuda.functions import CudaKernels
from moestro.model.cuda.tiles import replace_launcher
from moestro.model.device import open_network
from moestro.model.experts.expert_pieces import Progress
from moestro.model.settings import LocalRank, ModelSettings
from moestro.model.staged.staged_device import StagedTorchDevice, open_staged_device
from moestro.model.staged.staged_network import StagedNetwork

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.models import make_qwen3_config
from shared.results import make_parser, save, spread

ROWS, CONTEXT, BLOCK_SIZE, MOST = (1, 8, 32, 128), 1000, 16, 128
NUM_BLOCKS = MOST * (CONTEXT // BLOCK_SIZE + 1)
_FEW_EXPERTS, _FEW_TOKENS = 8, 4096  # without a GPU, where no expert computes
_NONE = np.empty(0, np.int32)


def open_on_gpu(settings: ModelSettings) -> tuple[StagedTorchDevice, Any, dict[str, Any]]:
    """Open a device whose layers are recorded. Returns it, its graphs, and what they took."""
    begun: dict[str, tuple[float, int]] = {}  # of a phase: when, and the bytes that were free

    def note(phase: str) -> None:
        if phase in ("record graphs", "ready"):
            begun[phase] = time.perf_counter(), torch.cuda.mem_get_info()[0]

    local = LocalRank(max_tokens=MOST, max_seqs=MOST, records_steps=True)
    device, info = open_staged_device(settings, MOST, note, local)
    graphs = device._stages._recorded
    assert graphs is not None, "nothing was recorded"
    (before_s, before), (after_s, after) = begun["record graphs"], begun["ready"]
    taken = {"record_s": round(after_s - before_s, 2), "recorded_bytes": before - after, "graphs": graphs.num_graphs}
    return device, graphs, taken | {"planned_bytes": info.card.graph_bytes if info.card else None}


class _NoGraph:
    """Stands for a CUDA graph."""

    def replay(self) -> None:
        """Do nothing."""


def open_imitation(settings: ModelSettings) -> tuple[StagedTorchDevice, Any, dict[str, Any]]:
    """Do the same where no kernel runs."""
    checked = open_network(settings)
    network = checked.network
    staged = StagedNetwork(network)
    for name in ("is_close", "_is_same_choice"):
        setattr(exchange, name, lambda *_: True)
    network_module.can_pack = lambda *_: False
    torch.cuda.CUDAGraph, torch.cuda.graph, torch.cuda.graph_pool_handle = (  # type: ignore[misc, assignment]
        _NoGraph, lambda *_, **__: nullcontext(), lambda: None,
    )  # fmt: skip
    replace_launcher(lambda *_: None)
    network.use_kernels(CudaExchange(CudaKernels(network.device, network.dtype)))
    network.pack()
    shape = StageShape(
        is_sparse=staged.is_sparse, num_experts=network.num_experts, num_chosen=checked.num_chosen, num_rows=MOST,
        num_places=MOST,
    )  # fmt: skip
    device = StagedTorchDevice(staged, checked.probe.allocate(NUM_BLOCKS), shape)
    plan = layer_graphs.plan_layer_graphs(network, MOST, 2 * CONTEXT, BLOCK_SIZE, max_tokens=MOST)
    assert plan is not None
    graphs = plan.record(staged, device.pools)
    assert graphs is not None, "nothing was recorded"
    return device, graphs, {"graphs": graphs.num_graphs}


def make_item(num_rows: int, num_layers: int) -> Passage:
    """A step of one-token units up to the sampler."""
    start = CONTEXT // 2 + np.arange(num_rows, dtype=np.int32) * 7 % (CONTEXT // 2)
    width = CONTEXT // BLOCK_SIZE + 1
    units = Units(
        slot=np.arange(num_rows, dtype=np.int64), serial=np.arange(num_rows),
        service_class=np.full(num_rows, LS, np.uint8), start=start, num_tokens=np.ones(num_rows, np.int32),
        write_start=start, logits=np.full(num_rows, LOGITS_LAST, np.uint8),
        block_tables=np.arange(num_rows * width, dtype=np.int32).reshape(num_rows, width),
        sampling=np.zeros(num_rows, SAMPLING_ROW), token_ids=np.arange(num_rows, dtype=np.int32) * 31 + 5,
    )  # fmt: skip
    rows = np.arange(num_rows, dtype=np.int32)
    return Passage(0, num_layers, units, rows, rows, Merges(_NONE, _NONE))


@torch.inference_mode()
def run(device: StagedTorchDevice, item: Passage) -> tuple[float, float]:
    """Milliseconds until all layers are queued, and until they are done."""
    on_gpu = device.network.device.type == "cuda"
    clock = time.perf_counter if on_gpu else time.thread_time
    started = clock()
    for _ in device._stages.pieces(Progress(item)):
        pass
    queued = clock()
    if on_gpu:
        torch.cuda.synchronize()
    return (queued - started) * 1e3, (clock() - started) * 1e3


def result(device: StagedTorchDevice, item: Passage) -> list[torch.Tensor]:
    """Bits that a step leaves."""
    for blocks in device.pools.blocks():
        blocks.fill_(0.5)
    run(device, item)
    stream = device._stages.arena.read_hidden(slice(0, len(item.rows)))
    return [stream.clone(), *(blocks[: item.units.block_tables.max() + 1].clone() for blocks in device.pools.blocks())]


def measure(device: StagedTorchDevice, graphs: Any, num_rows: int, repeats: int) -> dict[str, Any]:
    """Both ways, in turn."""
    item, ways = make_item(num_rows, device.network.num_layers), {"launched": None, "replayed": graphs}
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    left = {}
    for number in range(repeats + 1):
        for way, layers in ways.items():
            device.replay(layers)
            if not number:
                left[way] = result(device, item)
            pair = run(device, item)
            times[way] += [pair] if number else []
    row: dict[str, Any] = {"rows": num_rows}
    on_gpu = device.network.device.type == "cuda"
    for way in ways:
        host, whole = zip(*times[way], strict=True)
        row[f"{way}_host_ms"] = spread(list(host))
        row |= {f"{way}_ms": spread(list(whole))} if on_gpu else {}
    row["host_ratio"] = round(row["launched_host_ms"]["median"] / row["replayed_host_ms"]["median"], 1)
    if on_gpu:
        pairs = zip(left["launched"], left["replayed"], strict=True)
        row["equal_bits"] = all(torch.equal(one, other) for one, other in pairs)
    return row


def main() -> None:
    """Measure all numbers of rows."""
    parser = make_parser(__doc__)
    parser.add_argument("--layers", type=int, help="layers of the network; 48 on a GPU, otherwise 8")
    parser.add_argument("--repeats", type=int, default=9)
    arguments, conditions = parser.parse_args(), run_record("measured")
    on_gpu = torch.cuda.is_available()
    layers = arguments.layers or (48 if on_gpu else 8)
    with tempfile.TemporaryDirectory() as directory:
        path = make_qwen3_config(Path(directory), layers, *(() if on_gpu else (_FEW_EXPERTS, _FEW_TOKENS)))
        settings = ModelSettings(
            str(path), load_format="dummy", dtype="bfloat16", device="cuda" if on_gpu else "cpu",
            kernels="own" if on_gpu else "eager", block_size=BLOCK_SIZE, max_model_len=2 * CONTEXT,
            num_gpu_blocks_override=NUM_BLOCKS,
        )  # fmt: skip
        device, graphs, taken = (open_on_gpu if on_gpu else open_imitation)(settings)
        rows = []
        for num_rows in ROWS:
            rows.append(measure(device, graphs, num_rows, arguments.repeats))
            print(rows[-1], flush=True)
    name = torch.cuda.get_device_name() if on_gpu else "none: launches and replays do nothing"
    figures = {"gpu": name, "layers": layers, **taken, "rows": rows}
    print({key: value for key, value in figures.items() if key != "rows"})
    save(arguments.json, conditions, figures)


if __name__ == "__main__":
    main()
