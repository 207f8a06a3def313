"""Measures the own CPU kernels against torch's and against the memory's bandwidth, and decode steps with both.

    OMP_NUM_THREADS=1 python bench/micro/cpu_kernels.py --work /tmp/bench --json bench/results/micro/cpu_kernels.json

A decode step touches the weights of attention, of the experts that it visits and of the head, and the keys and values
of its contexts; its share is the time that the memory's bandwidth would take for those bytes, over the step's time.

Products of many rows are limited by arithmetic: `own_gflop_s` is beside `peak_gflop_s`, the speed of torch's float32
matrix product, which is near that of the fused multiply-adds.

All is in bfloat16, in processor time of one thread, the least of many rounds in turn. Kernels have the sizes of the
640M model of `bench/serving/engine.py`; decode steps have contexts of 128 tokens. --models demo leaves that model out.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from moestro.config.run_record import run_record
from moestro.core.views import LS
from moestro.core.work import LOGITS_LAST, SAMPLING_ROW, Units
from moestro.model.attention import Scoring, attend_paged
from moestro.model.experts.routed import combine
from moestro.model.kernels.exchange import KernelExchange, KernelExperts
from moestro.model.kernels.library import KernelBuild, KernelLibrary, KernelPacking
from moestro.model.kernels.packing import TORCH_PACKING
from moestro.model.kernels.paged import KernelAttention
from moestro.model.load import load_network, read_config
from moestro.model.network import Network
from moestro.model.pools import KVPools
from moestro.model.settings import ModelSettings
from moestro.model.step import PagedStep

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.models import DEMO, make_random_model
from shared.results import make_parser, save

NUM_ROWS, CONTEXT, BLOCK_SIZE = (1, 8, 32), 128, 16
PROMPT, PROMPTS = 512, (128, 512, 2048)
HIDDEN, INNER, NUM_EXPERTS, NUM_CHOSEN = 1024, 512, 32, 4
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 16, 4, 64
CPU, BF16 = torch.device("cpu"), torch.bfloat16


def least_us(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Least processor time of one call of each way, taken in turn."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, call in ways.items():
            started = time.thread_time_ns()
            call()
            best[name] = min(best[name], (time.thread_time_ns() - started) / 1e3)
    return {name: round(value, 1) for name, value in best.items()}


def measure_bandwidth() -> float:
    """GB/s with which one thread reads memory that no cache holds."""
    data = torch.ones(1 << 28, dtype=torch.uint8).view(torch.int64)
    return data.numel() * 8 / 1e3 / least_us({"sum": data.sum}, 7)["sum"]


def measure_peak() -> float:
    """10^9 float32 operations a second of one thread in a large matrix product."""
    size = 1024
    one, other = torch.randn(2, size, size)
    return 2 * size**3 / 1e3 / least_us({"product": lambda: one @ other}, 20)["product"]


def linear_ways(library: KernelLibrary, num_rows: int) -> Iterator[tuple[str, int, dict[str, Callable[[], object]]]]:
    """Products with weights that no cache holds, taken in turn: (name, bytes of a product, ways)."""
    packing, count = KernelPacking(library), 64
    weights = [torch.randn(HIDDEN, HIDDEN).to(BF16) for _ in range(count)]
    rows, turn = torch.randn(num_rows, HIDDEN).to(BF16), iter(range(1 << 62))
    ways: dict[str, Callable[[], object]] = {}
    for name, way in (("own", packing), ("torch", TORCH_PACKING)):
        packed = [way.pack(weight) for weight in weights]
        ways[name] = lambda way=way, packed=packed: way.linear(rows, packed[next(turn) % count])
    yield "linear", 2 * HIDDEN * HIDDEN, ways


def expert_ways(library: KernelLibrary, num_rows: int) -> Iterator[tuple[str, int, dict[str, Callable[[], object]]]]:
    """Routed experts of a layer, with the bytes of those that are visited."""
    weights = [(torch.randn(2 * INNER, HIDDEN) / 32, torch.randn(HIDDEN, INNER) / 32) for _ in range(NUM_EXPERTS)]
    ids = torch.rand(num_rows, NUM_EXPERTS).argsort(1)[:, :NUM_CHOSEN]
    tokens, shares = torch.randn(num_rows, HIDDEN).to(BF16), torch.rand(num_rows, NUM_CHOSEN)
    counts = torch.zeros(NUM_EXPERTS, dtype=torch.int64)
    packed = {
        name: [tuple(way.pack(each.to(BF16)) for each in pair) for pair in weights]
        for name, way in (("own", KernelPacking(library)), ("torch", TORCH_PACKING))
    }
    own = KernelExperts(library, (HIDDEN, INNER), packed["own"])

    def by_torch() -> Tensor:
        by_expert = ids.reshape(-1).argsort(stable=True)
        rows, done, end = tokens[by_expert // NUM_CHOSEN], [], 0
        for expert, count in enumerate(ids.reshape(-1).bincount(minlength=NUM_EXPERTS).tolist()):
            if count:
                up, down = packed["torch"][expert]
                gate, linear = TORCH_PACKING.linear(rows[end : end + count], up).chunk(2, dim=-1)
                done.append(TORCH_PACKING.linear(functional.silu(gate) * linear, down))
                end += count
        return combine(torch.cat(done), by_expert, shares).to(BF16)

    num_visited = len(ids.unique())
    ways: dict[str, Callable[[], object]] = {
        "own": lambda: own.weighted_sum(tokens, ids, shares, counts),
        "torch": by_torch,
    }
    yield "experts", num_visited * 6 * HIDDEN * INNER, ways


def attention_ways(library: KernelLibrary, num_rows: int) -> Iterator[tuple[str, int, dict[str, Callable[[], object]]]]:
    """Attention of a decode step, and of a prompt of 512 tokens."""
    scoring = Scoring(None, None, None)
    for name, units in (("decode attention", decode_units(num_rows)), ("prompt attention", prompt_units(PROMPT))):
        num_tokens = int(units.num_tokens.sum())
        query = torch.randn(1, num_tokens, NUM_HEADS, HEAD_SIZE).to(BF16).transpose(1, 2)
        key, value = (torch.randn(1, num_tokens, NUM_KV_HEADS, HEAD_SIZE).to(BF16).transpose(1, 2) for _ in range(2))
        pools = KVPools(int(units.block_tables.max()) + 1, BLOCK_SIZE)
        step, own = PagedStep(units, pools, CPU), KernelAttention(library, None)
        num_keys = int((units.start + units.num_tokens).sum())
        ways: dict[str, Callable[[], object]] = {
            "own": lambda s=step, o=own, t=(query, key, value): o(s, 0, *t, scoring),
            "torch": lambda s=step, t=(query, key, value): attend_paged(s, 0, *t, scoring),
        }
        if name.startswith("decode") == (num_rows != PROMPT):
            yield name, 4 * num_keys * NUM_KV_HEADS * HEAD_SIZE, ways


def row_ways(library: KernelLibrary, num_rows: int) -> Iterator[tuple[str, int, dict[str, Callable[[], object]]]]:
    """Norms and rotations."""
    rows, weight = torch.randn(1, num_rows, HIDDEN).to(BF16), torch.ones(HIDDEN, dtype=BF16)

    def norm() -> Tensor:
        wide = rows.to(torch.float32)
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(BF16)

    yield "norm", 4 * rows.numel(), {"own": lambda: library.rms_norm(rows, weight, 1e-6), "torch": norm}
    heads = torch.randn(1, num_rows, NUM_HEADS, HEAD_SIZE).to(BF16).transpose(1, 2)
    cos, sin = (torch.rand(1, num_rows, HEAD_SIZE).to(BF16) for _ in range(2))

    def rotate() -> Tensor:
        first, second = heads.chunk(2, dim=-1)
        return heads * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]

    yield "rotation", 4 * heads.numel(), {"own": lambda: library.rotate(heads, cos, sin), "torch": rotate}


def kernel_rows(library: KernelLibrary, num_rows: int) -> Iterator[dict[str, object]]:
    """Processor time and speed of each kernel."""
    num_products = {"linear": HIDDEN * HIDDEN, "experts": 3 * NUM_CHOSEN * HIDDEN * INNER}  # of a row
    for make in (linear_ways, expert_ways, attention_ways, row_ways):
        for name, num_bytes, ways in make(library, num_rows):
            found = least_us(ways, 5 if num_rows == PROMPT else 60)
            row: dict[str, object] = {"kernel": name, "rows": num_rows, **{f"{w}_us": us for w, us in found.items()}}
            row |= {f"{way}_gb_s": round(num_bytes / 1e3 / us, 2) for way, us in found.items()}
            if name in num_products:
                num_flops = 2 * num_rows * num_products[name]
                row |= {f"{way}_gflop_s": round(num_flops / 1e3 / us, 1) for way, us in found.items()}
            yield row


def decode_units(num_units: int) -> Units:
    """One token of each of some sequences of CONTEXT tokens."""
    width = CONTEXT // BLOCK_SIZE + 1
    return make_units(np.full(num_units, CONTEXT), np.arange(num_units * width).reshape(num_units, width), 1)


def prompt_units(length: int) -> Units:
    """One prompt."""
    return make_units(np.zeros(1), np.arange(length // BLOCK_SIZE + 1)[None], length)


def make_units(start: np.ndarray, tables: np.ndarray, num_tokens: int) -> Units:
    count = len(start)
    return Units(
        slot=np.arange(count, dtype=np.int64),
        serial=np.arange(count),
        service_class=np.full(count, LS, np.uint8),
        start=start.astype(np.int32),
        num_tokens=np.full(count, num_tokens, np.int32),
        write_start=start.astype(np.int32),
        logits=np.full(count, LOGITS_LAST, np.uint8),
        block_tables=tables.astype(np.int32),
        sampling=np.zeros(count, SAMPLING_ROW),
        token_ids=np.random.default_rng(0).integers(3, 4000, count * num_tokens).astype(np.int32),
    )


def open_networks(directory: Path, library: KernelLibrary) -> dict[str, tuple[Network, KVPools]]:
    """The network with own kernels, and with torch's."""
    opened = {}
    for name in ("own", "torch"):
        settings = ModelSettings(model=str(directory), dtype="bfloat16", device="cpu")
        network, _ = load_network(settings, read_config(settings))
        pools = network.probe(BLOCK_SIZE)[0].allocate(512)
        if name == "own":
            network.use_kernels(KernelExchange(library))
        network.pack()
        opened[name] = network, pools
    return opened


def bytes_touched(network: Network, units: Units) -> int:
    """Bytes of weights, keys and values that a step reads, each once. The last step must have been that of `units`."""
    assert network.routing is not None
    config = network.model.config
    num_unvisited = int((network.routing.counts == 0).sum())
    num_values = network.num_parameters - num_unvisited * 3 * config.hidden_size * config.moe_intermediate_size
    if not config.tie_word_embeddings:
        num_values -= config.vocab_size * config.hidden_size  # only the tokens' own rows are read
    num_keys = int((units.start + units.num_tokens).sum()) * config.num_hidden_layers
    return BF16.itemsize * (num_values + 2 * num_keys * config.num_key_value_heads * config.head_dim)


def step_rows(model: str, directory: Path, library: KernelLibrary, bandwidth: float) -> Iterator[dict[str, object]]:
    """Processor time of decode steps and of prompts, up to the logits. `bandwidth`: GB/s."""
    opened = open_networks(directory, library)
    steps = {f"decode, {n} rows": decode_units(n) for n in NUM_ROWS}
    steps |= {f"prompt of {n}": prompt_units(n) for n in PROMPTS}
    for name, units in steps.items():
        ways: dict[str, Callable[[], object]] = {
            way: lambda n=network, p=pools, u=units: n.logits(PagedStep(u, p, CPU))
            for way, (network, pools) in opened.items()
        }
        found = least_us(ways, 3 if units.num_tokens[0] > PROMPTS[0] else 40 if model == "demo" else 12)
        row: dict[str, object] = {"model": model, "step": name}
        row |= {f"{way}_ms": round(us / 1e3, 2) for way, us in found.items()}
        if name.startswith("decode"):
            touched = bytes_touched(opened["own"][0], units)
            row |= {
                "mb_touched": round(touched / 1e6, 1),
                "own_share": round(touched / 1e3 / bandwidth / found["own"], 3),
            }
        yield row


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for the random model")
    parser.add_argument("--models", choices=["demo", "both"], default="both")
    args = parser.parse_args()
    conditions = run_record("measured")
    library = KernelBuild().wait()
    if library is None:
        raise SystemExit("the kernels cannot be compiled here")
    rows: list[dict[str, object]] = []
    limits = {"bandwidth_gb_s": round(measure_bandwidth(), 1), "peak_gflop_s": round(measure_peak(), 1)}
    print(json.dumps({**limits, "instruction_set": library.instruction_set}), flush=True)
    with torch.inference_mode():
        for num_rows in (*NUM_ROWS, PROMPT):
            for row in kernel_rows(library, num_rows):
                rows.append(row)
                print(json.dumps(row), flush=True)
    models = {"demo": DEMO}
    if args.models == "both":
        models["640m"] = make_random_model(args.work / "random-640m")
    for model, directory in models.items():
        for row in step_rows(model, directory, library, limits["bandwidth_gb_s"]):
            rows.append(row)
            print(json.dumps(row), flush=True)
    setting = {"num_threads": torch.get_num_threads(), "instruction_set": library.instruction_set}
    save(args.json, conditions, {**setting, **limits, "rows": rows})


if __name__ == "__main__":
    main()
