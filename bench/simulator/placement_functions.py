"""Times `moestro.placement.eplb` beside DeepSeek's and vLLM's own functions, and compares their outputs."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from placement_loads import Bed, zipf
from rich.console import Console
from rich.table import Table

from moestro.placement.eplb import rebalance_experts, rebalance_experts_vllm

sys.path.insert(0, str(Path(__file__).parents[1]))


def time_functions(
    console: Console, beds: tuple[Bed, ...], deepseek: Path | None, vllm: Path | None, seeds: range, repeats: int
) -> list[dict[str, object]]:
    """Plan Zipf loads (s=0.6) with every function, globally and, where groups allow it, by nodes.

    Returns:
        For each case and function, milliseconds of processor time (median, least and most over seeds of the median of
        the repeats), and the number of seeds whose outputs equal ours.
    """
    rows = []
    for bed in beds:
        forms = {"global": (1, 1)}
        if bed.num_nodes > 1 and bed.model.num_groups % bed.num_nodes == 0:
            forms["by nodes"] = (bed.model.num_groups, bed.num_nodes)
        for form, (num_groups, num_nodes) in forms.items():
            sizes = (bed.num_devices * bed.num_slots, num_groups, num_nodes, bed.num_devices)
            for name, function, twin in _pairs(deepseek, vllm):
                spent, num_equal = [], 0
                for seed in seeds:
                    weight = zipf(bed.model, 0.6, np.random.default_rng([0, seed]))
                    spent.append(_time(lambda f=function, w=weight, a=sizes: f(w, *a), repeats))
                    num_equal += np.array_equal(function(weight, *sizes), twin(weight, *sizes))
                row = {"case": bed.name, "form": form, "function": name, "equal": f"{num_equal} of {len(seeds)}"}
                row["ms"] = [round(f(spent), 3) for f in (statistics.median, min, max)]
                rows.append(row)
    _show(console, rows)
    return rows


def _pairs(deepseek: Path | None, vllm: Path | None) -> list[tuple[str, Callable, Callable]]:
    """Name, function and our function with which its placement must agree; each returns the expert of each slot."""

    def ours(weight: np.ndarray, *sizes: int) -> np.ndarray:
        return rebalance_experts(weight, *sizes)[0]

    pairs = [
        ("moestro, DeepSeek's form", ours, ours),
        ("moestro, vLLM's form", rebalance_experts_vllm, rebalance_experts_vllm),
    ]
    if deepseek is not None or vllm is not None:
        import torch  # noqa: PLC0415 (the peers need it, and the bench without them does not)
        from shared import eplb_peers  # noqa: PLC0415
    if deepseek is not None:
        peer = eplb_peers.deepseek(deepseek)
        pairs.append(("DeepSeek", lambda w, *a: peer.rebalance_experts(torch.from_numpy(w), *a)[0].numpy(), ours))
    if vllm is not None:
        policy = eplb_peers.vllm(vllm)
        pairs.append(
            ("vLLM", lambda w, *a: policy.rebalance_experts(torch.from_numpy(w), *a).numpy(), rebalance_experts_vllm)
        )
    return pairs


def _time(function: Callable[[], object], repeats: int) -> float:
    """Milliseconds of processor time: median of the repeats after one that warms up."""
    spent = []
    for _ in range(repeats + 1):
        begin = time.process_time()
        function()
        spent.append(1e3 * (time.process_time() - begin))
    return statistics.median(spent[1:])


def _show(console: Console, rows: list[dict[str, object]]) -> None:
    table = Table(title="functions: Zipf s=0.6", title_justify="left")
    for heading in ("case", "form", "function", "ms (least, most)", "placements equal ours"):
        table.add_column(heading)
    for row in rows:
        median, least, most = row["ms"]
        table.add_row(
            row["case"], row["form"], row["function"], f"{median:.1f} ({least:.1f}, {most:.1f})", row["equal"]
        )
    console.print(table)
