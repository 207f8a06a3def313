"""Writes the cases with which `moestro.placement.eplb` is compared: random loads, and what the peers make of them.

    python tools/eplb_cases.py EPLB.PY VLLM_DIR

EPLB.PY is DeepSeek's source at the commit below. VLLM_DIR is an unpacked wheel of vLLM, of which only
`vllm/distributed/eplb/policy` is needed. Both peers run with stable sorts: their own leave the order of equal loads to
versions of their libraries and to the processor. Where no two loads are equal, their own sorts must give the same
placement, which the script checks.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "bench"))
from shared import eplb_peers  # noqa: E402 (its folder lies beside this one)

COMMIT, VLLM_VERSION = "d52c72d5b2f2fb4c41afbf8eb21366820339913d", "0.33.0"
CASES = ROOT / "tests" / "placement" / "eplb_cases.npz"
NUM_DEEPSEEK, NUM_VLLM = 500, 100
MAX_REPLICAS = 320
SCALE = 1 / 3  # loads that are no whole numbers are multiples of it


def random_sizes(rng: np.random.Generator) -> dict[str, int]:
    """Draw sizes until they are small enough to store: hierarchical or not, with redundant slots or without."""
    while True:
        sizes = any_sizes(rng)
        if sizes["num_replicas"] <= MAX_REPLICAS:
            return sizes


def any_sizes(rng: np.random.Generator) -> dict[str, int]:
    num_nodes = int(rng.choice([1, 2, 3, 4, 8], p=[0.2, 0.3, 0.15, 0.25, 0.1]))
    num_gpus = num_nodes * int(rng.integers(1, 9))
    is_hierarchical = rng.random() < 0.5
    num_groups = (
        num_nodes * int(rng.integers(1, 5)) if is_hierarchical else (1 if rng.random() < 0.7 else num_nodes + 1)
    )
    group_size = int(rng.integers(1, 9)) if is_hierarchical else int(rng.integers(2, 65))
    num_experts = num_groups * group_size
    least = -(-num_experts // num_gpus)
    if rng.random() < 0.2 and is_hierarchical:
        num_experts = num_groups * num_gpus  # divides evenly: no slot is redundant
        least = num_groups
        num_more = 0
    else:
        num_more = int(rng.integers(0, 4))
    return {
        "num_layers": int(rng.integers(1, 3)),
        "num_experts": num_experts,
        "num_replicas": (least + num_more) * num_gpus,
        "num_groups": num_groups,
        "num_nodes": num_nodes,
        "num_gpus": num_gpus,
    }


def random_loads(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[np.ndarray, bool]:
    """Draw uint16[layers, experts], and whether the load is SCALE times that."""
    kind = rng.choice(["counts", "fractions", "zipf", "ties", "zeros", "nothing"], p=[0.3, 0.2, 0.2, 0.13, 0.15, 0.02])
    if kind == "zipf":
        ranks = rng.permuted(np.tile(np.arange(1, shape[1] + 1), (shape[0], 1)), axis=1)
        counts = 60_000 * ranks ** -rng.uniform(0.2, 1.2) * rng.uniform(0.8, 1.0, shape)
    else:
        counts = rng.integers(0, 10 if kind == "ties" else 60_000, shape)
    if kind == "zeros":
        counts = np.where(rng.random(shape) < 0.3, 0, counts)
    if kind == "nothing":
        counts = np.zeros(shape)
    return counts.astype(np.uint16), bool(kind == "fractions")


def are_distinct(weight: np.ndarray, count: np.ndarray) -> bool:
    """Whether no two experts have the same load per copy."""
    each = np.sort(weight.astype(np.float32) / count, axis=1)
    return bool((np.diff(each, axis=1) > 0).all())


class Cases:
    """Arrays of all cases, laid end to end."""

    def __init__(self) -> None:
        self.parts: dict[str, list[np.ndarray]] = {}

    def add(self, name: str, array: object, kind: type = np.int16) -> None:
        found = np.asarray(array)
        assert found.min(initial=0) >= np.iinfo(kind).min
        assert found.max(initial=0) <= np.iinfo(kind).max
        self.parts.setdefault(name, []).append(found.reshape(-1).astype(kind))

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: np.concatenate(parts) for name, parts in self.parts.items()}


def add_case(cases: Cases, prefix: str, rng: np.random.Generator) -> tuple[np.ndarray, tuple[int, ...]]:
    sizes = random_sizes(rng)
    counts, is_scaled = random_loads(rng, (sizes["num_layers"], sizes["num_experts"]))
    cases.add(f"{prefix}_sizes", [*sizes.values(), is_scaled])
    cases.add(f"{prefix}_weight", counts, np.uint16)
    targets = tuple(sizes[name] for name in ("num_replicas", "num_groups", "num_nodes", "num_gpus"))
    return counts * (SCALE if is_scaled else 1.0), targets


def add_deepseek(cases: Cases, peer: object) -> int:
    num_checked = 0
    for case in range(NUM_DEEPSEEK):
        weight, targets = add_case(cases, "deepseek", np.random.default_rng([1, case]))
        with eplb_peers.stable_sorts():
            physical, logical, count = peer.rebalance_experts(torch.tensor(weight), *targets)
        if are_distinct(weight, count.numpy()):
            own = peer.rebalance_experts(torch.tensor(weight), *targets)
            assert torch.equal(own[0], physical)
            assert torch.equal(own[2], count)
            assert torch.equal(own[1].sort(-1).values, logical.sort(-1).values)
            num_checked += 1
        cases.add("deepseek_physical", physical)
        cases.add("deepseek_logical", logical)
        cases.add("deepseek_count", count)
    return num_checked


def add_vllm(cases: Cases, peer: type) -> int:
    num_checked = 0
    for case in range(NUM_VLLM):
        rng = np.random.default_rng([2, case])
        weight, targets = add_case(cases, "vllm", rng)
        old = None
        with eplb_peers.stable_sorts():
            if case % 3 == 1:  # the load has drifted
                drifted = weight * rng.lognormal(0, 0.2, weight.shape)
                old = peer.rebalance_experts(torch.tensor(drifted), *targets)
            elif case % 3 == 2:
                old = torch.tensor(rng.integers(0, weight.shape[1], (len(weight), targets[0])))
            new = peer.rebalance_experts(torch.tensor(weight), *targets, old)
        count = np.array([np.bincount(row, minlength=weight.shape[1]) for row in new.numpy()])
        if are_distinct(weight, count):
            assert torch.equal(peer.rebalance_experts(torch.tensor(weight), *targets, old), new)
            num_checked += 1
        cases.add("vllm_old", [] if old is None else old)
        cases.add("vllm_has_old", [old is not None])
        cases.add("vllm_physical", new)
    return num_checked


def main() -> None:
    deepseek, vllm = eplb_peers.deepseek(Path(sys.argv[1])), eplb_peers.vllm(Path(sys.argv[2]))
    cases = Cases()
    alike = add_deepseek(cases, deepseek), add_vllm(cases, vllm)
    source = f"deepseek-ai/EPLB {COMMIT}; vLLM {VLLM_VERSION}; torch {torch.__version__}; numpy {np.__version__}"
    np.savez_compressed(CASES, source=source, **cases.arrays())
    print(f"{CASES}: {CASES.stat().st_size} bytes; unstable sorts gave the same in {alike} cases without equal loads")


if __name__ == "__main__":
    main()
