"""Measures sizes of the tiles of GPU kernels: how long a recorded step takes with each of them.

    python bench/micro/gpu_tiles.py --json bench/results/micro/gpu_tiles.json        # on a GPU; some two minutes
    python bench/micro/gpu_tiles.py --compile 0/4                                    # only compile every fourth form

A form names what differs from the sizes in use (`model.cuda.tiles`). The network has the width of Qwen3-30B-A3B, few
layers and random weights; each step is recorded as a CUDA graph and replayed. `equal_bits`: whether its logits have
the bits of the sizes in use, as they must unless SPLIT, which is part of the order of a sum, differs. The form `cublas`
multiplies dense weights by torch, whose order of sums depends on the batch: what equal bits cost. Forms are compiled
first when several processes with `--compile` run beside each other.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from moestro.config.run_record import run_record
from moestro.model.cuda import functions, graphs, tiles
from moestro.model.cuda.functions import CudaKernels, Product
from moestro.model.cuda.graphs import GraphShape
from moestro.model.cuda.tiles import Tile
from moestro.model.settings import ModelSettings
from moestro.model.step import PagedStep

sys.path.insert(0, str(Path(__file__).parents[1]))
from serving.cuda_steps import BLOCK_SIZE, Bench, Shape, units_of
from shared.models import make_qwen3_config
from shared.results import make_parser, save, spread

CONTEXT, PROMPT, VOCABULARY = 1024, 2048, 151_936
DECODES = [Shape(num_units, 1, CONTEXT) for num_units in (1, 8, 32, 128)]
CHUNK = Shape(1, PROMPT, 0)
REPEATS, REPLAYS = 5, {False: 30, True: 8}  # replays of a repeat, of decodes and of chunks

Form = Callable[[], None]


def splits(size: int) -> Form:
    """Splits of so many keys."""

    def use() -> None:
        for module in (functions, tiles, graphs):
            module.SPLIT = size

    return use


def dense(most_rows: int, *tile: int) -> Form:
    """Another tile of dense products up to so many rows; 0 means all above the others."""

    def use() -> None:
        tiles._DENSE = _with(tiles._DENSE, most_rows, Tile(*tile))

    return use


def experts(most_rows: int, *tile: int) -> Form:
    """Another tile of experts up to so many rows each; 0 means all above the others."""

    def use() -> None:
        tiles._EXPERTS = _with(tiles._EXPERTS, most_rows, Tile(*tile))

    return use


def _with(rows: tuple[tuple[int, Tile], ...], most_rows: int, tile: Tile) -> tuple[tuple[int, Tile], ...]:
    return tuple((most, tile if most == most_rows else each) for most, each in rows)


def cublas() -> None:
    """Dense products by torch."""

    def product(_: CudaKernels, inputs: Any, weight: Any, bias: Any = None, *, dtype: Any = None, **__: Any) -> Product:
        return Product(torch.nn.functional.linear(inputs, weight, bias).to(dtype or inputs.dtype), 1)

    CudaKernels.product = product  # type: ignore[method-assign, assignment]


# Rows, outputs and depth of a tile, warps, stages, rows of an expert's last tile.
DECODE_FORMS: dict[str, Form] = {
    "splits of 128 keys": splits(128),
    "splits of 64 keys": splits(64),
    "dense 16 x 32 x 128": dense(16, 16, 32, 128, 4, 5),
    "dense 16 x 32 x 128, 2 warps": dense(16, 16, 32, 128, 2, 6),
    "dense 16 x 64 x 256": dense(16, 16, 64, 256, 4, 3),
    "experts 16 x 32 x 128": experts(16, 16, 32, 128, 4, 5),
    "experts 16 x 32 x 256": experts(16, 16, 32, 256, 4, 3),
    "experts 16 x 64 x 256": experts(16, 16, 64, 256, 4, 2),
    "experts 16 x 64 x 128, 3 stages": experts(16, 16, 64, 128, 4, 3),
}
CHUNK_FORMS: dict[str, Form] = {
    "experts 128 x 128 x 64, 4 stages": experts(0, 128, 128, 64, 8, 4, 32),
    "experts 64 x 128 x 64": experts(0, 64, 128, 64, 8, 4, 16),
    "experts 128 x 128 x 64, tail 64": experts(0, 128, 128, 64, 8, 3, 64),
    "dense 128 x 128 x 64, 3 stages": dense(0, 128, 128, 64, 8, 3),
    "dense 256 x 64 x 64": dense(0, 256, 64, 64, 8, 4),
    "dense 256 x 128 x 64": dense(0, 256, 128, 64, 8, 3),
    "dense 128 x 128 x 128": dense(0, 128, 128, 128, 8, 2),
}
IN_USE = "in use"
FORMS: dict[str, tuple[Form, list[Shape]]] = {
    IN_USE: (lambda: None, [*DECODES, CHUNK]),
    **{name: (form, DECODES) for name, form in DECODE_FORMS.items()},
    **{name: (form, [CHUNK]) for name, form in CHUNK_FORMS.items()},
    "cublas": (cublas, [*DECODES, CHUNK]),
    "in use, again": (lambda: None, [*DECODES, CHUNK]),
}


@contextmanager
def used(form: Form) -> Iterator[None]:
    """Let kernels have a form."""
    before = tiles._DENSE, tiles._EXPERTS, functions.SPLIT, CudaKernels.product
    form()
    try:
        yield
    finally:
        tiles._DENSE, tiles._EXPERTS = before[:2]
        splits(before[2])()
        CudaKernels.product = before[3]  # type: ignore[method-assign]


def step_of(shape: Shape) -> Any:
    """The units of a step; a prompt has exactly PROMPT tokens."""
    found = units_of(shape, VOCABULARY, 0)
    if shape.num_new == 1:
        return found
    tokens = np.random.default_rng(0).integers(VOCABULARY, size=PROMPT, dtype=np.int32)
    table = np.arange(PROMPT // BLOCK_SIZE, dtype=np.int32)[None]
    return msgspec.structs.replace(found, num_tokens=np.full(1, PROMPT, np.int32), token_ids=tokens, block_tables=table)


def recorded(bench: Bench, pools: Any, shape: Shape) -> tuple[Any, torch.Tensor]:
    """The graph of a step's shape, after a replay for the step, and its first logits."""
    network, is_chunk = bench.checked.network, shape.num_new > 1
    graph_shape = GraphShape(shape.num_units * shape.num_new, has_chunks=is_chunk)
    plan = graphs.GraphPlan(shapes=(graph_shape,), max_model_len=2 * PROMPT, num_bytes=0)
    found = graphs.StepGraphs(network, network.exchange.kernels, pools, plan)
    found.record()
    torch.manual_seed(1)
    for blocks in pools.blocks():
        blocks.normal_()
    logits = found.logits(PagedStep(step_of(shape), pools, network.device))
    assert logits is not None, "the step does not fit its graph"
    return next(iter(found._graphs.values())).graph, logits[:1].clone()


def replay_ms(graph: Any, count: int) -> list[float]:
    """Milliseconds of a replay, the mean of each repeat."""
    found = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / count)
    return found


def main() -> None:
    """Measure, or only compile, all forms."""
    parser = make_parser(__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--compile", metavar="I/N", help="only compile every N-th form from the I-th on")
    arguments, conditions = parser.parse_args(), run_record("measured")
    first, stride = map(int, arguments.compile.split("/")) if arguments.compile else (0, 1)
    graphs._LONGER_STEPS = ()
    with tempfile.TemporaryDirectory() as directory:
        path = make_qwen3_config(Path(directory), 1 if arguments.compile else arguments.layers)
        settings = ModelSettings(
            str(path), load_format="dummy", dtype="bfloat16", device="cuda", kernels="eager", block_size=BLOCK_SIZE,
            kv_cache_memory_bytes=1,
        )  # fmt: skip
        bench = Bench(torch.device("cuda", 0), REPEATS, settings)
        bench.use_own_kernels()
    pools = bench.checked.probe.allocate(max(shape.num_blocks for shape in (*DECODES, CHUNK)))
    rows: list[dict[str, Any]] = []
    in_use: dict[str, torch.Tensor] = {}
    for name, (form, shapes) in list(FORMS.items())[first::stride]:
        for shape in shapes:
            with used(form):
                graph, logits = recorded(bench, pools, shape)
            if arguments.compile:
                continue
            is_equal = torch.equal(in_use.setdefault(shape.name, logits), logits)
            times = spread(replay_ms(graph, REPLAYS[shape.num_new > 1]))
            rows.append({"form": name, "step": shape.name, "replay_ms": times, "equal_bits": is_equal})
            print(rows[-1], flush=True)
            save(
                arguments.json,
                conditions,
                {"gpu": torch.cuda.get_device_name(), "layers": arguments.layers, "rows": rows},
            )


if __name__ == "__main__":
    main()
