"""Compares the cost model with published measurements, and fits the host constants to some of them.

    python bench/simulator/cost_checks.py [--json bench/results/simulator/cost_checks.json] [--docs docs/costs.md]

Nothing is timed here. Published figures (published_steps.json, each with its source) are compared with the model's
prices. The host's two constants are fitted, by least squares of relative errors, to the A100 and H100 rows marked
"fit"; every other row is a check. Tables of single operations are compared too where ../shared/calibration exists.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from moestro.config.run_record import run_record
from moestro.cost.gpus import A100, H200, Gpu, gpu_named
from moestro.cost.model import Batch, even_gating, zipf_popularity
from moestro.cost.networks import NetworkShape, network_from_config, network_named
from moestro.cost.roofline import VLLM_HOST, HostCost, Kernels, Roofline, RooflineSettings

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save

BENCH = Path(__file__).parent
CALIBRATION = BENCH.parents[2] / "shared" / "calibration"
NO_HOST = HostCost(step_ns=0, sequence_ns=0)
ZIPF = {"mixtral-8x7b": 0.3, "mixtral-8x7b-int8": 0.3}
Row = dict[str, Any]


# --- published steps -------------------------------------------------------------------------------------------------


def published() -> tuple[dict[str, NetworkShape], list[Row]]:
    """Return the networks that have no name in `cost`, and the published rows."""
    data = json.loads((BENCH / "published_steps.json").read_text())
    return {name: network_from_config(name, config) for name, config in data["networks"].items()}, data["rows"]


def roofline(network: NetworkShape, gpu: str, ranks: int, host: HostCost, zipf: float) -> Roofline:
    gating = None
    if network.experts is not None:
        popularity = zipf_popularity(network.experts.num_experts, zipf)
        gating = even_gating(popularity, network.experts.top_k, ranks)
    settings = RooflineSettings(network=network, gpu=gpu_named(gpu), host=host, num_ep_ranks=ranks, gating=gating)
    return Roofline(settings)


def priced_ms(row: Row, host: HostCost, more: dict[str, NetworkShape], zipf: float | None = None) -> float:
    """Return the model's price of a published row, ms."""
    network = more.get(row["network"]) or network_named(row["network"])
    exponent = ZIPF.get(row["network"], 0.6) if zipf is None else zipf
    ranks = row.get("ranks", 1)
    model = roofline(network, row["gpu"], ranks, host, exponent)
    if "expert_rows" in row:
        return model.expert_ns(row["expert_rows"]) / 1e6
    decodes, chunks = row.get("decodes", 0), row.get("chunks", [])
    batch = Batch(
        np.array([row["context"] - 1 for _ in range(decodes)] + [cached for cached, _ in chunks], np.int64),
        np.array([1] * decodes + [new for _, new in chunks], np.int64),
    )
    own_host = host.sequence_ns * (row.get("host_sequences", num_sequences(row)) - num_sequences(row))
    return (model.group_step_ns([batch] * ranks) + own_host) / 1e6


def num_sequences(row: Row) -> int:
    return int(row.get("decodes", 0)) + len(row.get("chunks", []))


def fit_host(rows: list[Row], more: dict[str, NetworkShape], zipf: float | None = None) -> dict[str, float]:
    """Fit the two host constants by least squares of relative errors; the prices of kernels stay fixed."""
    measured = np.array([row["measured_ms"] for row in rows])
    kernels = np.array([priced_ms(row, NO_HOST, more, zipf) for row in rows])
    sequences = np.array([num_sequences(row) for row in rows])
    parts = np.stack([np.ones(len(rows)), sequences], axis=1)
    (step_ms, sequence_ms), *_ = np.linalg.lstsq(parts / measured[:, None], (measured - kernels) / measured)
    error = np.abs(kernels + step_ms + sequence_ms * sequences - measured) / measured
    return {
        "step_ms": round(float(step_ms), 3),
        "sequence_us": round(float(sequence_ms) * 1e3, 1),
        "mean_error": round(float(error.mean()), 4),
    }


def with_context(rows: list[Row], more_tokens: int) -> list[Row]:
    """Return ML.ENERGY's rows with prompts longer by `more_tokens`."""
    return [row | {"context": row["context"] + more_tokens} if "ML.ENERGY" in row["source"] else row for row in rows]


def fits(rows: list[Row], more: dict[str, NetworkShape]) -> dict[str, dict[str, float]]:
    """Return the fit that is used, and its change under other assumptions."""
    chosen = [row for row in rows if row["use"] == "fit"]
    gpqa = [row for row in rows if row["name"].startswith("GPQA") and row["network"] == "qwen3-30b-a3b"]
    return {
        "used: A100 and H100 rows marked fit": fit_host(chosen, more),
        "prompts of 0 tokens, not 250": fit_host(with_context(chosen, -250), more),
        "prompts of 500 tokens": fit_host(with_context(chosen, 250), more),
        "popularity zipf 0.8, not 0.6": fit_host(chosen, more, 0.8),
        "Qwen3-30B-A3B alone": fit_host([row for row in chosen if row["network"] == "qwen3-30b-a3b"], more),
        "and its GPQA rows": fit_host(chosen + gpqa, more),
    }


def compare(rows: list[Row], more: dict[str, NetworkShape]) -> list[Row]:
    """Price every row with the host constants of the code."""
    compared = []
    for row in rows:
        ms = priced_ms(row, VLLM_HOST, more)
        error = ms / row["measured_ms"] - 1
        kept = {key: row[key] for key in ("name", "gpu", "network", "source", "measured_ms", "use")}
        compared.append(kept | {"priced_ms": round(ms, 3), "error": round(error, 4)})
    return compared


# --- tables of single operations -------------------------------------------------------------------------------------


def grid(name: str) -> list[Row]:
    import pyarrow.parquet  # noqa: PLC0415 (a development dependency, and only where the tables are)

    rows: list[Row] = pyarrow.parquet.read_table(CALIBRATION / f"{name}_perf.parquet").to_pylist()
    return rows


def summary(pairs: list[tuple[float, float]]) -> dict[str, float]:
    """Summarise the errors of (measured, priced) pairs."""
    error = np.array([abs(priced / measured - 1) for measured, priced in pairs])
    return {
        "num_rows": len(pairs),
        "mean_error": round(float(error.mean()), 4),
        "p90_error": round(float(np.quantile(error, 0.9)), 4),
        "largest_error": round(float(error.max()), 4),
    }


def experts_pairs(gpu: Gpu, rows: list[Row], network: NetworkShape) -> list[tuple[float, float]]:
    """Pair the table's experts of this network's shape on one GPU: 1 to 4,096 tokens, power-law popularity of 1.01."""
    experts = network.experts
    assert experts is not None
    shape = (network.hidden_size, experts.intermediate_size, experts.top_k, experts.num_experts)
    gating = even_gating(zipf_popularity(experts.num_experts, 0.6), experts.top_k)
    kernels, pairs = Kernels(network, gpu, 1), []
    for row in rows:
        of_shape = (row["hidden_size"], row["inter_size"], row["topk"], row["num_experts"]) == shape
        plain = row["moe_dtype"] == "bfloat16" and row["moe_tp_size"] == row["moe_ep_size"] == 1
        n = row["num_tokens"]
        if of_shape and plain and row["distribution"] == "power_law_1.01" and n <= 4096:
            priced = kernels.experts_ns(float(gating.activated(n)[0, 0]), n * experts.top_k)
            pairs.append((row["latency"], priced / 1e6))
    return pairs


def gemm_pairs(gpu: Gpu, rows: list[Row], network: NetworkShape) -> list[tuple[float, float]]:
    """Pair matrix products of at least 2 M weights in bfloat16; smaller ones measure the launch alone."""
    kernels = Kernels(network, gpu, 1)
    return [
        (row["latency"], kernels.gemm_ns(row["m"], (row["n"], row["k"]), 2.0) / 1e6)
        for row in rows
        if row["gemm_dtype"] == "bfloat16" and 2e6 <= row["n"] * row["k"] <= 64e6 and row["m"] <= 8192
    ]


def attention_rows(rows: list[Row], network: NetworkShape) -> list[Row]:
    num_kv_heads = network.attention.kv_bytes_per_token // 512
    return [
        row
        for row in rows
        if (row["num_heads"], row["num_key_value_heads"], row["head_dim"]) == (32, num_kv_heads, 128)
        and row["kv_cache_dtype"] == "bfloat16"
        and not row.get("window_size")
    ]


def decode_pairs(gpu: Gpu, rows: list[Row], network: NetworkShape) -> list[tuple[float, float]]:
    kernels, pairs = Kernels(network, gpu, 1), []
    for row in attention_rows(rows, network):
        context = row["isl"] + row["step"]
        if 128 <= context <= 32_768 and row["batch_size"] <= 256:
            reading = row["batch_size"] * context * kernels.decode_token_ns
            pairs.append((row["latency"], (kernels.decode_ns(row["batch_size"]) + reading) / 1e6))
    return pairs


def prefill_pairs(gpu: Gpu, rows: list[Row], network: NetworkShape) -> list[tuple[float, float]]:
    kernels = Kernels(network, gpu, 1)
    return [
        (row["latency"], kernels.prefill_ns([(0, row["isl"])] * row["batch_size"], None) / 1e6)
        for row in attention_rows(rows, network)
        if row["isl"] >= 256 and row["isl"] * row["batch_size"] <= 16_384
    ]


Pairs = Callable[[Gpu, list[Row], NetworkShape], list[tuple[float, float]]]


def compare_grids() -> dict[str, dict[str, float]]:
    """Compute errors against AIConfigurator's tables of one A100 and one H200."""
    found = {}
    kinds: dict[str, tuple[str, str, Pairs]] = {
        "experts": ("moe", "moe", experts_pairs),
        "gemm": ("gemm", "gemm", gemm_pairs),
        "decode attention": ("attention", "generation_attention", decode_pairs),
        "prefill attention": ("attention", "context_attention", prefill_pairs),
    }
    for gpu, system, version in ((A100, "a100_sxm", "0.14.0"), (H200, "h200_sxm", "0.24.0")):
        for kind, (family, operation, pairs_of) in kinds.items():
            rows = grid(f"{system}_{family}_vllm_{version}_{operation}")
            for name in ("qwen3-30b-a3b", "mixtral-8x7b"):
                if kind != "gemm":
                    found[f"{gpu.name}, {kind}, {name}"] = summary(pairs_of(gpu, rows, network_named(name)))
            if kind == "gemm":
                found[f"{gpu.name}, {kind}"] = summary(pairs_of(gpu, rows, network_named("qwen3-30b-a3b")))
    return found


# --- results ---------------------------------------------------------------------------------------------------------


def mean_error(rows: list[Row]) -> float:
    return round(float(np.mean([abs(row["error"]) for row in rows])), 4)


def series_of(row: Row) -> tuple[str, ...]:
    """Key of the rows that differ in a length or a number of requests alone."""
    return row["gpu"], row["network"], row["use"], re.sub(r"\d+", "", row["name"])


def table(rows: list[Row]) -> list[str]:
    """One line for each series: what its first and last rows measure, and the span of measurements and errors."""
    lines = ["| GPU | network | what | measured, ms | error: mean, from, to | |", "|---|---|---|---|---|---|"]
    for (gpu, network, use, _), series in itertools.groupby(rows, series_of):
        found = list(series)
        name, measured, error = found[0]["name"], f"{found[0]['measured_ms']:g}", f"{found[0]['error']:+.1%}"
        if len(found) > 1:
            name += f" to {found[-1]['name'].partition(', ')[2]}"
            measured += f" to {found[-1]['measured_ms']:g}"
            errors = sorted(row["error"] for row in found)
            error = f"{mean_error(found):.1%}, {errors[0]:+.1%}, {errors[-1]:+.1%}"
        lines.append(f"| {gpu} | {network} | {name} | {measured} | {error} | {'fit' if use == 'fit' else ''} |")
    return lines


def markdown(result: Row) -> str:
    """Format the generated part of docs/costs.md."""
    fitted, others = result["mean_error_of_fit_rows"], result["mean_error_of_check_rows"]
    lines = [
        *table(result["rows"]),
        "",
        f"Mean absolute error: {fitted:.1%} over the rows marked fit, {others:.1%} over the others.",
        "",
        *table_of_operations(result["grids"]),
    ]
    return "\n".join(lines)


def table_of_operations(grids: dict[str, Row]) -> list[str]:
    """One line for each operation, with the errors of its networks on each GPU, in the order of `grids`."""
    cells: dict[str, dict[str, list[str]]] = {}
    for name, errors in grids.items():
        gpu, operation, *_ = name.split(", ")
        cell = cells.setdefault(operation, {}).setdefault(gpu, [])
        cell.append(f"{errors['mean_error']:.1%} ({errors['largest_error']:.1%})")
    gpus = list(dict.fromkeys(name.split(", ")[0] for name in grids))
    heads = ["mean (largest) error of single operations; Qwen3-30B-A3B, Mixtral 8x7B", *gpus]
    rows = [[operation, *(", ".join(by_gpu[gpu]) for gpu in gpus)] for operation, by_gpu in cells.items()]
    return [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]


def write_docs(path: Path, generated: str) -> None:
    before, rest = path.read_text().split("<!-- generated by bench/simulator/cost_checks.py -->\n")
    _, after = rest.split("<!-- end of generated -->\n")
    marks = ("<!-- generated by bench/simulator/cost_checks.py -->\n", "\n<!-- end of generated -->\n")
    path.write_text(before + marks[0] + generated + marks[1] + after)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--docs", type=Path)
    arguments = parser.parse_args()
    conditions = run_record("computed")
    more, rows = published()
    compared = compare(rows, more)
    result = {
        "host": {"step_ms": VLLM_HOST.step_ns / 1e6, "sequence_us": VLLM_HOST.sequence_ns / 1e3},
        "host_fits": fits(rows, more),
        "mean_error_of_fit_rows": mean_error([row for row in compared if row["use"] == "fit"]),
        "mean_error_of_check_rows": mean_error([row for row in compared if row["use"] == "check"]),
        "rows": compared,
        "grids": compare_grids() if CALIBRATION.is_dir() else {},
    }
    print(markdown(result))
    save(arguments.json, conditions, result)
    if arguments.docs:
        write_docs(arguments.docs, markdown(result))


if __name__ == "__main__":
    main()
