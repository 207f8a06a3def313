"""Measures steps of the torch device on a GPU, beside transformers on the same weights and beside the hardware.

    python bench/serving/cuda_steps.py --json bench/results/serving/cuda_steps.json

The network is Qwen3-30B-A3B in bfloat16 with random weights, which are drawn on the device, so that nothing is
downloaded. `--layers`, `--experts` and `--vocabulary` make it smaller. A whole run on an H100 should take
less than six minutes; that is an estimate, because none has run yet. Each part is stored when it is done: with the same
--json, settings and commit, another run does the missing ones.

- `ceilings`: bytes that a device-to-device copy reads and writes, bytes that a sum reads, and FLOPs of a bfloat16
  product of square matrices.
- `moestro`: a decode of N sequences with so much context (`--decode NxCONTEXT`), and prompts (`--prefill TOKENS`), on
  torch's kernels. Each step is another batch: lengths lie between half and one and a half of the given one, with the
  given one as mean, because a server hardly ever repeats a shape, and torch may keep a plan for each.
  `step_ms` is launch to result. `launch_ms` is the host's part: while it lasts the device may idle. `queued_ms` is a
  step of several that are launched at once: the device's time, unless the host takes longer.
- `transformers`: the plain forward of transformers with sdpa and its grouped experts, on the same weights. For decodes
  it has a dynamic cache with random K and V, as `generate` would use. All its lengths are the given one.
- `continuous batching`: transformers' scheduler with its paged cache, from `transformers_cb.py`. `step_ms` is the time
  from one token of a request to the next.
- `own kernels`: as `moestro`, on Moestro's own kernels, with decodes recorded as CUDA graphs. `equal_bits`: whether
  units of the batch get the same bits alone, and from the graph. No other part can follow.
- `profile`: the operations that take most of the device's time in one step of `moestro`.

`floor_ms` is the larger of two times: bytes that a step has to read, over the larger of the two rates; and its FLOPs,
over theirs. The bytes are all weights but those of experts that no token chose, and K and V. `peak_bytes` is the most
memory that torch had reserved. A part that fails has a row with the error.
"""

from __future__ import annotations

import gc
import inspect
import json
import math
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from moestro.calibrate.runner import once_ns
from moestro.config.run_record import run_record
from moestro.core.views import LS
from moestro.core.work import LOGITS_LAST, SAMPLING_ROW, Forward, StepResult, Units
from moestro.model.check import use_own_functions
from moestro.model.device import TorchDevice, open_network
from moestro.model.network import Network
from moestro.model.pools import KVPools
from moestro.model.settings import ModelSettings
from moestro.model.step import PagedStep
from moestro.model.tensors import prepare

sys.path.insert(0, str(Path(__file__).parents[1]))
from serving import transformers_cb
from shared.models import make_qwen3_config
from shared.results import make_parser, save, spread

BLOCK_SIZE = 16
# 128 sequences of 1,024 tokens take 13 GB of K and V beside 61 GB of weights.
DECODES, PREFILLS = ("1x1024", "8x1024", "32x1024", "128x1024"), (128, 512, 2048, 8192)
PARTS = ("ceilings", "moestro", "profile", "transformers", "continuous batching", "own kernels")
_WARM, _MOST_STEPS, _ENOUGH_S = 2, 20, 1.0  # steps of one repeat: as many as fit in the time, within the bounds
_NUM_QUEUED, _NUM_OPERATIONS, _NUM_ALONE = 16, 12, 3  # steps that hide the launch of the first; of a profile; units
_PATIENCE_S = 10.0  # for a part that ends because it took too long
# Sizes for the ceilings, by kind of device: far above the caches of one, and bearable for the other.
_COPIED_BYTES = {"cuda": 4 << 30, "cpu": 64 << 20}
_MATRIX = {"cuda": 8192, "cpu": 512}
_CB_TOKENS = 16  # of each answer, of which the first comes from the prefill

Row = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A step: `num_units` units of `num_new` tokens each, behind `context` tokens of K and V."""

    num_units: int
    num_new: int
    context: int

    @property
    def name(self) -> str:
        kind = "prefill" if self.num_new > 1 else "decode"
        return f"{kind} {self.num_units} x {self.num_new if self.num_new > 1 else self.context}"

    @property
    def num_blocks(self) -> int:
        """Blocks that suffice for every batch of `lengths`."""
        num_tokens = self.num_units * (self.context + self.num_new)
        if self.num_units == 1:  # whose mean is that of several batches
            num_tokens *= 2
        return -(-num_tokens // BLOCK_SIZE) + self.num_units

    def lengths(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw (context, new tokens) of each unit, int32[units] each, around those of the shape.

        Two units, or the same unit under two seeds 2 n and 2 n + 1, differ from the mean by as much in both directions.
        """
        base = self.context or self.num_new
        pair = np.arange(self.num_units) // 2 if self.num_units > 1 else np.zeros(1, np.int64)
        sign = np.where(np.arange(self.num_units) % 2 == seed % 2, 1, -1)
        rng = np.random.default_rng([seed // 2, self.num_units])
        off = sign * rng.integers(0, base // 2 + 1, self.num_units)[pair]
        if self.num_units > 1 and self.num_units % 2:
            off[-1] = 0
        context, new = np.full((2, self.num_units), [[self.context], [self.num_new]], np.int32)
        return (context + off, new) if self.context else (context, new + off)


@dataclass
class Bench:
    """State that all parts share.

    Attributes:
        device: device under test.
        repeats: repeats of each measurement.
        settings: those of the network.
        ceilings: bytes and FLOPs a second that were measured; empty before.
        touched: for each shape, experts that had tokens, over all layers.
    """

    device: torch.device
    repeats: int
    settings: ModelSettings
    ceilings: dict[str, float] = field(default_factory=dict)
    touched: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._checked: Any = None
        prepare(self.device)
        torch.zeros(1, device=self.device)  # opens the device, which has no statistics of memory before

    @property
    def checked(self) -> Any:
        """The loaded network, not packed, so that transformers' functions can run on its weights."""
        if self._checked is None:
            self._checked = open_network(self.settings)
        return self._checked

    def use_own_kernels(self) -> None:
        """Exchange the network's modules for own kernels, once. transformers' functions cannot run them afterwards."""
        from moestro.model.cuda.exchange import CudaExchange  # noqa: PLC0415 - they need Triton
        from moestro.model.cuda.functions import CudaKernels  # noqa: PLC0415

        network = self.checked.network
        if network.exchange is None:
            network.use_kernels(CudaExchange(CudaKernels(network.device, network.dtype)))
            network.pack()

    def settle(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak_bytes(self) -> int | None:
        """Most memory that was reserved since the last call; None on a CPU."""
        if self.device.type != "cuda":
            return None
        peak = torch.cuda.max_memory_reserved(self.device)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak

    def times_ms(self, call: Callable[[Any], object], items: Iterable[Any] = repeat(None)) -> list[float]:
        """Milliseconds of a call that is over when the device is settled: the mean of each repeat.

        Args:
            items: the arguments, one a call, which are made outside of the measured time.
        """
        rest = iter(items)
        for item in islice(rest, _WARM):
            call(item)
        self.settle()
        (item,) = islice(rest, 1)
        started = time.perf_counter()
        call(item)
        self.settle()
        num = int(_ENOUGH_S / self.repeats / max(time.perf_counter() - started, 1e-6))
        num = min(max(num // 2 * 2, 2), _MOST_STEPS)  # whole pairs of lengths
        found = []
        for _ in range(self.repeats):
            given = list(islice(rest, num))
            started = time.perf_counter()
            for item in given:
                call(item)
                self.settle()
            found.append((time.perf_counter() - started) * 1e3 / num)
        return found

    def compared(self, shape: Shape, times: list[float]) -> Row:
        """The times of a step, and its floor."""
        row: Row = {"step_ms": spread(times)}
        if self.ceilings and shape.name in self.touched:
            num_bytes, flops = work_of(self.checked, shape, self.touched[shape.name])
            floor = 1e3 * max(num_bytes / self.ceilings["bytes_per_s"], flops / self.ceilings["flops_per_s"])
            row |= {"floor_ms": round(floor, 3), "of_floor": round(row["step_ms"]["median"] / floor, 2)}
            row |= {"read_bytes": num_bytes, "flops": flops}
        return row


def work_of(checked: Any, shape: Shape, num_touched: int) -> tuple[int, int]:
    """Bytes that a step has to read, and its FLOPs. `num_touched`: experts that have tokens, over all layers."""
    network, config = checked.network, checked.network.config
    num_tokens = shape.num_units * shape.num_new
    head = config.vocab_size * config.hidden_size
    kv_bytes = checked.probe.bytes_per_block // checked.probe.block_size * shape.num_units * shape.context
    num_bytes = sum(network.layer_bytes) + head * network.dtype.itemsize
    num_bytes += num_touched * network.bytes_per_expert + kv_bytes
    weights = sum(network.layer_bytes) // network.dtype.itemsize
    weights += len(network.experts) * checked.num_chosen * network.bytes_per_expert // network.dtype.itemsize
    flops = 2 * weights * num_tokens + 2 * head * shape.num_units
    keys = shape.context + (shape.num_new + 1) // 2  # that a query attends to, on average
    flops += 4 * network.num_layers * config.num_attention_heads * config.head_dim * keys * num_tokens
    return num_bytes, flops


def units_of(shape: Shape, vocabulary: int, seed: int, temperature: float = 0) -> Units:
    """Units of random tokens in blocks of their own, with lengths of their own; greedy at temperature 0."""
    num_units = shape.num_units
    start, num_new = shape.lengths(seed)
    num_blocks = -(-(start + num_new) // BLOCK_SIZE)
    sampling = np.zeros(num_units, SAMPLING_ROW)
    sampling["top_p"], sampling["repetition_penalty"], sampling["temperature"] = 1, 1, temperature
    sampling["num_logprobs"] = sampling["num_prompt_logprobs"] = -1
    rng = np.random.default_rng(seed)
    tables = np.zeros((num_units, num_blocks.max()), np.int32)
    tables[np.arange(tables.shape[1]) < num_blocks[:, None]] = rng.permutation(shape.num_blocks)[: num_blocks.sum()]
    return Units(
        slot=np.arange(num_units, dtype=np.int64),
        serial=np.arange(num_units),
        service_class=np.full(num_units, LS, np.uint8),
        start=start,
        num_tokens=num_new,
        write_start=start,
        logits=np.full(num_units, LOGITS_LAST, np.uint8),
        block_tables=tables,
        sampling=sampling,
        token_ids=rng.integers(vocabulary, size=int(num_new.sum()), dtype=np.int32),
    )


def take(device: TorchDevice, count: int) -> list[StepResult]:
    """Wait for the results of so many steps."""
    results: list[StepResult] = []
    while len(results) < count:
        results += device.poll(0)
    return results


# --- parts; each yields rows


def ceilings(bench: Bench) -> Iterator[Row]:
    kind, size = bench.device.type, _MATRIX[bench.device.type]
    source = torch.empty(_COPIED_BYTES[kind] // 2, dtype=torch.bfloat16, device=bench.device).normal_()
    target = torch.empty_like(source)
    copies = bench.times_ms(lambda _, target=target, source=source: target.copy_(source))
    del target
    source = source.view(torch.float32)
    source = torch.cat((source, source))
    sums = bench.times_ms(lambda _, source=source: source.sum())
    del source
    left, right = (torch.randn(size, size, device=bench.device).bfloat16() for _ in range(2))
    products = bench.times_ms(lambda _: left @ right)
    copied = 2 * _COPIED_BYTES[kind] / (float(np.median(copies)) / 1e3)
    read = 2 * _COPIED_BYTES[kind] / (float(np.median(sums)) / 1e3)
    yield {
        "copy_ms": spread(copies),
        "product_ms": spread(products),
        "sum_ms": spread(sums),
        "copied_bytes_per_s": copied,
        "read_bytes_per_s": read,
        "bytes_per_s": max(copied, read),
        "flops_per_s": 2 * size**3 / (float(np.median(products)) / 1e3),
        "peak_bytes": bench.peak_bytes(),
    }


def moestro(bench: Bench, shape: Shape, *, on_own_kernels: bool = False, temperature: float = 0) -> Iterator[Row]:
    checked, more = bench.checked, {}
    pools = checked.probe.allocate(shape.num_blocks)
    for blocks in pools.blocks():
        blocks.normal_()
    device = TorchDevice(checked.network, pools)
    if on_own_kernels:
        from moestro.model.cuda.graphs import plan_graphs  # noqa: PLC0415

        longest = 2 * max(shape.context, shape.num_new)
        num_tokens = shape.num_units * shape.num_new
        plan = plan_graphs(checked.network, shape.num_units, longest, BLOCK_SIZE, max_tokens=2 * num_tokens)
        graphs = plan.record(checked.network, pools)
        device.replay(graphs)
        more["equal_bits"] = has_equal_bits(checked.network, pools, shape, graphs)
    vocabulary = checked.network.config.vocab_size
    items = (Forward(units_of(shape, vocabulary, seed, temperature)) for seed in count())

    def step(item: Forward) -> object:
        device.launch(item, 0)
        return take(device, 1)

    times = bench.times_ms(step, items)
    launches, queued = [], []
    for _ in range(bench.repeats):
        batch = list(islice(items, _NUM_QUEUED))
        started = time.perf_counter()
        for number, each in enumerate(batch):
            device.launch(each, 0)
            if number == 0:
                launches.append((time.perf_counter() - started) * 1e3)
        result = take(device, len(batch))[-1]
        queued.append((time.perf_counter() - started) * 1e3 / len(batch))
    assert result.expert_counts is not None
    bench.touched[shape.name] = int((result.expert_counts > 0).sum())
    yield {
        **bench.compared(shape, times),
        "launch_ms": spread(launches),
        "queued_ms": spread(queued),
        "alone_ms": once_ns(device, next(items)) / 1e6,
        "touched": bench.touched[shape.name],
        "peak_bytes": bench.peak_bytes(),
        **more,
    }


def own_kernels(bench: Bench, shape: Shape, *, temperature: float = 0) -> Iterator[Row]:
    if bench.device.type == "cuda":
        bench.use_own_kernels()
        yield from moestro(bench, shape, on_own_kernels=True, temperature=temperature)


@torch.inference_mode()
def has_equal_bits(network: Network, pools: KVPools, shape: Shape, graphs: Any) -> bool:
    """Whether units of a batch get the same logits alone, and a batch the same from a graph."""
    units = units_of(shape, network.config.vocab_size, 0)
    together = network.logits(PagedStep(units, pools, network.device))
    few = range(min(shape.num_units, _NUM_ALONE))
    alone = [network.logits(PagedStep(one_of(units, unit), pools, network.device)) for unit in few]
    is_equal = all(torch.equal(each[0], row) for each, row in zip(alone, together, strict=False))
    if graphs is not None:
        replayed = graphs.logits(PagedStep(units, pools, network.device))
        is_equal &= replayed is not None and torch.equal(replayed, together)
    return is_equal


def one_of(units: Units, unit: int) -> Units:
    """One unit of a step as a step."""
    first = int(units.num_tokens[:unit].sum())
    names = ("slot", "serial", "service_class", "start", "num_tokens", "write_start", "logits", "block_tables")
    columns = {name: getattr(units, name)[unit : unit + 1] for name in (*names, "sampling")}
    return Units(**columns, token_ids=units.token_ids[first : first + int(units.num_tokens[unit])])


def profile(bench: Bench, shape: Shape) -> Iterator[Row]:
    checked = bench.checked
    device = TorchDevice(checked.network, checked.probe.allocate(shape.num_blocks))
    item = Forward(units_of(shape, checked.network.config.vocab_size, 0))
    once_ns(device, item)
    activity = torch.profiler.ProfilerActivity
    is_cuda = bench.device.type == "cuda"
    with torch.profiler.profile(activities=[activity.CPU, *([activity.CUDA] if is_cuda else [])]) as profiler:
        once_ns(device, item)
    figure = "self_device_time_total" if is_cuda else "self_cpu_time_total"
    found = sorted(profiler.key_averages(), key=lambda each: -getattr(each, figure))
    total = sum(getattr(each, figure) for each in found)
    operations = [
        {"name": each.key[:90], "calls": each.count, "ms": round(getattr(each, figure) / 1e3, 3)}
        for each in found[:_NUM_OPERATIONS]
    ]
    yield {"total_ms": round(total / 1e3, 3), "operations": operations, "peak_bytes": bench.peak_bytes()}


@torch.inference_mode()
def transformers(bench: Bench, shape: Shape) -> Iterator[Row]:
    network, model = bench.checked.network, bench.checked.network.model
    config, size = network.config, (shape.num_units, network.config.num_key_value_heads)
    ids = torch.randint(config.vocab_size, (shape.num_units, shape.num_new), device=bench.device)
    with use_own_functions(model, experts="grouped_mm"):
        cache = DynamicCache(config=config) if shape.context else None
        if cache is not None:
            for layer in range(network.num_layers):
                kv = torch.randn(*size, shape.context, config.head_dim, dtype=network.dtype, device=bench.device)
                cache.update(kv, kv.clone(), layer)

        def step(_: object) -> object:
            logits = model(
                input_ids=ids, past_key_values=cache, use_cache=cache is not None, logits_to_keep=1
            ).logits.argmax(-1)
            if cache is not None:
                cache.crop(-shape.num_new)
            return logits.cpu()

        times = bench.times_ms(step)
    yield {**bench.compared(shape, times), "peak_bytes": bench.peak_bytes()}


def continuous_batching(bench: Bench, shape: Shape) -> Iterator[Row]:
    if not shape.context:
        return
    model = bench.checked.network.model
    with use_own_functions(model, experts="grouped_mm"):
        generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        num_blocks = (shape.num_units + 1) * math.ceil((shape.context + _CB_TOKENS) / BLOCK_SIZE)
        known = inspect.signature(ContinuousBatchingConfig).parameters
        batching = ContinuousBatchingConfig(
            **{"page_size" if "page_size" in known else "block_size": BLOCK_SIZE},  # its name before transformers 5.23
            num_blocks=num_blocks,
            allow_block_sharing=False,
            max_batch_tokens=max(transformers_cb.MAX_BATCH_TOKENS, shape.num_units),
        )
        manager = model.init_continuous_batching(generation_config=generation, continuous_batching_config=batching)
        manager.start()
        try:
            load = {"users": shape.num_units, "num_requests": shape.num_units, "input_len": shape.context,
                    "output_len": _CB_TOKENS, "seed": 0}  # fmt: skip
            found = [transformers_cb.run(manager, model.config.vocab_size, load | {"seed": n}) for n in (0, 1)]
        finally:
            manager.stop(block=True)
    yield {
        **bench.compared(shape, [float(np.min(each["tpot_ms"])) for each in found]),
        "peak_bytes": bench.peak_bytes(),
    }


# --- the run


def parts_of(shapes: list[Shape], wanted: list[str]) -> Iterator[tuple[str, Callable[[Bench], Iterator[Row]]]]:
    """(name, function) of each part, those that may fail last."""
    ways = {
        "moestro": moestro, "profile": profile, "transformers": transformers,
        "continuous batching": continuous_batching, "own kernels": own_kernels,
    }  # fmt: skip
    if "ceilings" in wanted:
        yield "ceilings", ceilings
    for part in (part for part in PARTS if part in wanted and part in ways):
        for shape in shapes:
            yield f"{part}: {shape.name}", lambda bench, way=ways[part], shape=shape: way(bench, shape)


def kept_rows(path: Path | None, settings: Row, commit: str) -> list[Row]:
    """Rows of an earlier run of the same commit and settings, without those of failed parts."""
    if path is None or not path.exists():
        return []
    earlier = json.loads(path.read_text())
    if earlier["settings"] != settings or earlier["conditions"]["commit"] != commit:
        return []
    return [row for row in earlier["rows"] if "error" not in row]


def device_facts(device: torch.device) -> Row:
    """Name and sizes of the device."""
    if device.type != "cuda":
        return {"device": device.type}
    facts = torch.cuda.get_device_properties(device)
    return {
        "device": facts.name,
        "memory_bytes": facts.total_memory,
        "multiprocessors": facts.multi_processor_count,
        "cuda": torch.version.cuda,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--decode", nargs="*", default=DECODES, metavar="NxCONTEXT")
    parser.add_argument("--prefill", nargs="*", type=int, default=PREFILLS, metavar="TOKENS")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--part-limit", type=float, default=90.0, metavar="SECONDS")
    args = parser.parse_args()
    conditions = run_record("measured")
    shapes = [Shape(int(n), 1, int(context)) for n, context in (each.split("x") for each in args.decode)]
    shapes += [Shape(1, num_tokens, 0) for num_tokens in args.prefill]
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    settings = {name: getattr(args, name) for name in ("device", "layers", "experts", "vocabulary", "repeats")}
    rows = kept_rows(args.json, settings, conditions.commit)
    with tempfile.TemporaryDirectory() as directory:
        config = make_qwen3_config(Path(directory), args.layers, args.experts, args.vocabulary)
        model = ModelSettings(
            model=str(config), device=args.device, dtype="bfloat16", load_format="dummy", block_size=BLOCK_SIZE,
            kernels="eager", kv_cache_memory_bytes=1,
        )  # fmt: skip
        bench = Bench(device, args.repeats, model)
        for name, part in parts_of(shapes, args.parts):
            known = [row for row in rows if row["part"] == name]
            started = time.perf_counter()
            if not known:
                known = [{"part": name, **row} for row in run_part(part, bench, args.part_limit)]
                rows += known
            for row in known:
                learn(bench, row)
                print(json.dumps({**row, "seconds": round(time.perf_counter() - started, 1)}), flush=True)
            save(args.json, conditions, {"settings": settings, **device_facts(device), "rows": rows})


def _give_up(*_: object) -> None:
    raise TimeoutError("the part took longer than --part-limit")


def run_part(part: Callable[[Bench], Iterator[Row]], bench: Bench, limit_s: float) -> list[Row]:
    """Rows of a part, or one with the error."""
    bench.peak_bytes()  # memory of the part before is no part of this one's
    signal.signal(signal.SIGALRM, _give_up)
    signal.setitimer(signal.ITIMER_REAL, limit_s, _PATIENCE_S)  # again, where what it interrupts waits for a thread
    try:
        return list(part(bench))
    except Exception as error:  # one part's failure must not cost the others, whose device time is scarce
        traceback.print_exc()
        error.__traceback__ = None  # whose frames hold tensors
        bench.peak_bytes()
        return [{"error": f"{type(error).__name__}: {error}"[:500]}]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def learn(bench: Bench, row: Row) -> None:
    """Take from a row what later parts need."""
    if "bytes_per_s" in row:
        bench.ceilings = {name: row[name] for name in ("bytes_per_s", "flops_per_s")}
    if "touched" in row:
        bench.touched[row["part"].partition(": ")[2]] = row["touched"]


if __name__ == "__main__":
    main()
