"""Compile the GPU kernels for five generations of GPUs, none of which has to be there, and store what comes of them.

    python tools/kernel_table.py --json bench/results/kernels/compiled.json   # each tile, for all GPUs: some minutes
    python tools/kernel_table.py --heaviest --targets 80 90 100 120 --passed tests/cuda/passed_launches.txt
                                                                              # the largest tiles, as a test checks them
    python tools/kernel_table.py --targets 90 --only linear                   # some of them, printed

Each distinct launch of `kernel_launches` is compiled as Triton compiles it on a GPU. The site has a table of the stored
result (`tools/reference_tables.py`).
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STORED = ROOT / "bench" / "results" / "kernels" / "compiled.json"
SOURCES = ROOT / "src" / "moestro" / "model" / "cuda" / "source"
PRODUCTS = {"linear", "expert_up", "expert_down", "attend"}
# Kernels whose numbers another one repeats, so that a fused multiply-add in one of them would change bits.
REPEATED = {
    "linear",
    "expert_up",
    "expert_down",
    "attend",
    "add_norm",
    "heads",
    "choose",
    "add_answers",
}
# Stores of registers to memory that may be: wide attention over heads of 128 has nine on sm_90, and 14 on sm_100.
_FEW_SPILLS = 16
INSTRUCTIONS = ("HGMMA", "HMMA", "UTCHMMA", "FFMA", "STL", "LDL")


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel.

    Attributes:
        model, kernel, key: as in `kernel_launches.Launch`.
        tile: its sizes, in words.
        rows: rows of a product's tile.
        target: compute capability, times ten.
        registers: of a thread.
        spilled: whether registers went to memory.
        shared, shared_most: bytes of shared memory, and how many a program may have.
        instructions: how often each of INSTRUCTIONS occurs.
    """

    model: str
    kernel: str
    key: str
    tile: str
    rows: int
    target: int
    registers: int
    spilled: bool
    shared: int
    shared_most: int
    instructions: dict[str, int]

    def problems(self) -> Iterator[str]:
        """Say why it should not ship."""
        what = f"{self.kernel} of {self.model}, {self.tile}, on sm_{self.target}"
        count = self.instructions
        if count["STL"] > _FEW_SPILLS:
            yield f"{what}: {self.registers} registers are too few"
        if self.shared > self.shared_most:
            yield f"{what}: {self.shared} bytes of shared memory are more than {self.shared_most}"
        if self.kernel in PRODUCTS and not count["HGMMA"] + count["HMMA"] + count["UTCHMMA"]:
            yield f"{what}: no matrix instruction"
        if self.kernel in PRODUCTS and self.target == 90 and self.rows >= 64 and not count["HGMMA"]:
            yield f"{what}: no HGMMA"
        if self.kernel in REPEATED and count["FFMA"]:
            yield f"{what}: {count['FFMA']} fused multiply-adds"


@cache
def digest(*others: Path) -> str:
    """Digest of the kernels' sources and tiles, and of other files, without comments and docstrings."""
    parts = []
    for path in [*sorted(SOURCES.glob("*.py")), SOURCES.parent / "tiles.py", *others]:
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            is_text = isinstance(body, list) and body and isinstance(body[0], ast.Expr)
            if is_text and isinstance(body[0].value, ast.Constant):
                del body[0]
        parts.append(ast.unparse(tree))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def name_of(launch: Any, target: int) -> str:
    """A name of a compilation and of its checks: the same name means the same sources, compiler and outcome."""
    parts = digest(Path(__file__)), version("triton"), str(target), launch.key
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def compile_launch(launch, target: int) -> Compiled:
    """Compile one launch for one GPU."""
    import triton  # noqa: PLC0415 the table alone needs no Triton
    from kernel_launches import SHARED_BYTES  # noqa: PLC0415
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415

    kernel = getattr(import_module(f"moestro.model.cuda.source.{launch.module}"), launch.kernel)
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        dict(launch.signature),
        {(names.index(name),): value for name, value in launch.constants},
        {(names.index(name),): [["tt.divisibility", 16]] for name in launch.aligned},
    )
    options = {
        **dict(launch.options),
        "enable_fp_fusion": False,
        "launch_pdl": dict(launch.constants).get("AHEAD", False),
    }
    compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    dump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [dump, "--dump-resource-usage", "--dump-sass", file.name]
        dumped = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    counts = {name: len(re.findall(rf"\b{name}\b", dumped)) for name in INSTRUCTIONS}
    found = re.search(r"REG:(\d+)", dumped)
    assert found is not None, dumped
    sizes = dict(launch.constants) | dict(launch.options)
    return Compiled(
        launch.model, launch.kernel, launch.key, tile_of(sizes), rows_of(sizes), target, int(found[1]),
        counts["STL"] + counts["LDL"] > 0, compiled.metadata.shared, SHARED_BYTES[target], counts,
    )  # fmt: skip


def rows_of(sizes: dict) -> int:
    """Rows of the first operand of products."""
    return sizes.get("OUTS", sizes.get("ROWS", 0))


def tile_of(sizes: dict) -> str:
    """Sizes of a tile in words."""
    warps = f"{sizes['num_warps']} warps"
    if "OUTS" in sizes:
        form = "" if "SEGMENTS" not in sizes else " whole," if sizes["IS_WHOLE"] else " segment,"
        return f"{sizes['TOKENS']} x {sizes['OUTS']} x {sizes['DEPTH']},{form} {warps}, {sizes['num_stages']} stages"
    if "TILE" in sizes:
        return (
            f"{sizes['ROWS']} rows x {sizes['TILE']} keys of {sizes['SIZE_K']}, {warps}, {sizes['num_stages']} stages"
        )
    return warps


def one_shape(launches: Iterable) -> list:
    """Of each kernel and tile the last launch, whose shape is the largest model's or the oddest."""
    return list({(each.kernel, tile_of(dict(each.constants) | dict(each.options))): each for each in launches}.values())


def heaviest(launches: Iterable) -> list:
    """Of each kernel, and of attention for each size of keys, the launch that adds up most numbers in a warp."""
    found: dict[tuple, tuple[float, Any]] = {}
    for each in launches:
        sizes = dict(each.constants) | dict(each.options)
        columns = sizes["TOKENS"] if "OUTS" in sizes else sizes.get("TILE", 0) + sizes.get("WIDE_V", 0)
        weight = rows_of(sizes) * columns / sizes["num_warps"]
        group = each.kernel, sizes.get("SIZE_K")
        if group not in found or weight > found[group][0]:
            found[group] = weight, each
    return [each for _, each in found.values()]


def compile_all(launches: Iterable, target: int, jobs: int) -> list[Compiled]:
    """Compile launches for a GPU in processes of their own."""
    found = []
    with ProcessPoolExecutor(jobs) as pool:
        for each in pool.map(partial(compile_launch, target=target), launches):
            found.append(each)
            figures = f"{each.registers} registers, {each.shared} bytes, {each.instructions}"
            print(f"sm_{each.target} {each.kernel} of {each.model}, {each.tile}: {figures}", flush=True)
            for problem in each.problems():
                print(problem, flush=True)
    return found


def stored_table() -> str:
    """Return the stored result as Markdown: of each kernel and tile, the most that any shape needs."""
    stored = json.loads(STORED.read_text())
    rows: dict[tuple[str, str], dict[int, list[dict]]] = {}
    for each in stored["kernels"]:
        rows.setdefault((each["kernel"], each["tile"]), {}).setdefault(each["target"], []).append(each)
    targets = sorted({each["target"] for each in stored["kernels"]})
    lines = [
        f"| kernel | tile | {' | '.join(f'sm_{target}' for target in targets)} |",
        "|---|---|" + "---|" * len(targets),
    ]
    for (kernel, tile), by_target in sorted(rows.items()):
        cells = " | ".join(_cell(by_target.get(target, [])) for target in targets)
        lines.append(f"| `{kernel}` | {tile} | {cells} |")
    return "\n".join(lines)


def _cell(found: list[dict]) -> str:
    """Registers, shared memory and kinds of matrix instructions of launches with one tile on one GPU."""
    if not found:
        return ""
    matrix = sorted({name for each in found for name in INSTRUCTIONS[:3] if each["instructions"][name]})
    shared = max(each["shared"] for each in found) / 1024
    return ", ".join([str(max(each["registers"] for each in found)), f"{shared:.0f} KiB", *matrix])


def main() -> int:
    os.environ.pop("TRITON_INTERPRET", None)
    sys.path.insert(0, str(ROOT / "bench"))
    from kernel_launches import SHARED_BYTES, distinct_launches  # noqa: PLC0415 it loads torch
    from shared.results import make_parser, save  # noqa: PLC0415

    from moestro.config.run_record import run_record  # noqa: PLC0415

    parser = make_parser(__doc__)
    parser.add_argument("--targets", type=int, nargs="+", default=sorted(SHARED_BYTES), choices=sorted(SHARED_BYTES))
    parser.add_argument("--only", default="", help="only launches whose model or kernel contains this")
    parser.add_argument("--every-shape", action="store_true", help="all shapes of each kernel and tile")
    parser.add_argument("--heaviest", action="store_true", help="of each kernel the tile that takes most registers")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--passed", type=Path, help="file with names of launches that had no problem and are left out; written anew"
    )
    args = parser.parse_args()
    conditions = run_record("computed")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        passed = set(args.passed.read_text().split()) if args.passed and args.passed.exists() else set()
        compiled, names = [], set()
        for target in args.targets:
            launches = [each for each in distinct_launches(target) if args.only in f"{each.model} {each.kernel}"]
            choose = list if args.every_shape else heaviest if args.heaviest else one_shape
            named = {name_of(each, target): each for each in choose(launches)}
            compiled += compile_all([each for name, each in named.items() if name not in passed], target, args.jobs)
            names |= named.keys()
    problems = [problem for each in compiled for problem in each.problems()]
    result = {"sources": digest(), "triton": version("triton"), "kernels": [asdict(each) for each in compiled]}
    save(args.json, conditions, result)
    if args.passed and not problems:
        args.passed.write_text("\n".join(sorted(names)) + "\n")
    print(f"{len(compiled)} of {len(names)} kernels were compiled, with {len(problems)} problems")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
