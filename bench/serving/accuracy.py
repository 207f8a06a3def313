"""Answers with every feature on equal answers with all of them off: tokens and log probabilities, near ties counted.

    python bench/serving/accuracy.py                                  # the demo model, in some minutes
    python bench/serving/accuracy.py MODEL --features ep migration    # some features alone

The reference is `moestro serve` in `fused` mode with one engine, which sends every token through one forward pass.
Each feature is another server that answers the same prompts, greedily and in float32:

- ep: experts spread over two engines, and nothing else: placement off;
- migration: the same, while experts move between the engines without pause (POST /admin/placement/apply);
- copies: redundant slots in `ep`, filled with copies of experts, whose tokens the shares divide;
- async, async_copies: attention and two expert workers without, and with, copies chosen by queue depth;
- async_migration: the same, while experts move between the expert workers;
- preemption: `preemptive` mode, where latency-sensitive requests interrupt the prompts' batches at experts;
- eviction: `fused` mode with few KV blocks, where latency-sensitive requests take those of the prompts.

The exit status is 1 if a feature differs beyond the rule of `bench/shared/token_parity.py`, or could not be compared.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moestro.config.run_record import run_record

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save
from shared.server import MOESTRO, Server, started
from shared.token_parity import Parity, ScoredAnswer, scored

STEMS = (
    "def fibonacci(n):\n",
    "import os\nimport sys\n\n",
    "class Stack:\n    def push(self, item):\n",
    "x = [",
    "while True:\n    try:\n",
    "for i in range(10):\n",
    "def read(path):\n    with open(path) as file:\n",
    "The quick brown fox",
)
NUM_PROMPTS = 24
MAX_TOKENS = 96
IN_FLIGHT = 8  # prompts at once, so that batches have every size
_ANSWER_S = 600
_PAUSE_S = 0.02  # between two looks at a migration
EP = ("--mode", "ep", "--engines", "2")
ASYNC = ("--mode", "async", "--attention", "1", "--experts", "2", "--no-standby")
# KV blocks for two prompts with their answers, so that the third has to wait or to take those of another.
SCARCE = ("--num-gpu-blocks-override", "40", "--max-model-len", "512", "--max-num-seqs", "4")
QLLM = ("--scheduling-policy", "qllm", "--evict-policy", "least_computed_be_first")


@dataclass(frozen=True)
class Site:
    """A running server, and its operators' port."""

    server: Server
    admin_port: int

    def admin(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """Send a request to the operators' port. Returns status and JSON."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.admin_port}{path}", data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def ask(self, prompt: str, **fields: object) -> dict[str, Any]:
        """Return the body of a greedy completion."""
        body = {"prompt": prompt, "temperature": 0, "ignore_eos": True} | fields
        request = urllib.request.Request(
            f"{self.server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
            return json.load(answer)


# Disturbs a server until the event is set, and returns what it did, as text. It raises `NotRunError` if it cannot.
Disturb = Callable[[Site, threading.Event], str]


class NotRunError(Exception):
    """A feature cannot be switched on; the text says why."""


@dataclass(frozen=True)
class Feature:
    """One feature: flags of the server that has it, and what happens while the prompts are answered."""

    name: str
    flags: tuple[str, ...]
    disturb: Disturb | None = None
    service_class: str = "ls"


def prompts() -> list[str]:
    """Return the fixed prompts: short and long ones, some with a common beginning."""
    return [STEMS[i % len(STEMS)] * (1 + i // len(STEMS) * 4) + f"# {i}\n" for i in range(NUM_PROMPTS)]


def answers(site: Site, service_class: str) -> list[ScoredAnswer]:
    """Answer all prompts, several at once."""

    def one(prompt: str) -> ScoredAnswer:
        return scored(site.ask(prompt, max_tokens=MAX_TOKENS, logprobs=2, service_class=service_class))

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        return list(pool.map(one, prompts()))


# --- disturbances ---------------------------------------------------------------------------------------------------


def move_experts(site: Site, is_over: threading.Event) -> str:
    """Move experts to random places again and again."""
    rng, num_migrations = random.Random(0), 0
    while not is_over.is_set():
        apply_table(site, shuffled(shown_table(site), rng))
        num_migrations += 1
        while progress(site)["is_running"] and not is_over.is_set():
            time.sleep(_PAUSE_S)
    wait_for_migration(site)
    _, shown = site.admin("GET", "/admin/placement")
    if not shown["moved_bytes"]:
        raise NotRunError("no expert moved while the prompts were answered")
    moved = f"{shown['moved_bytes'] / 1e6:.1f} MB moved"
    return f"{num_migrations} migrations, {moved}, table version {shown['table_version']}"


def copy_experts(site: Site, is_over: threading.Event) -> str:
    """Fill the empty slots with copies, before the prompts are sent."""
    table = shown_table(site)
    rng = random.Random(1)
    num_copies = 0
    for layer in table:
        experts = sorted({expert for slots in layer for expert in slots if expert >= 0})
        for slots in layer:
            for slot, expert in enumerate(slots):
                if expert < 0:
                    slots[slot] = rng.choice([each for each in experts if each not in slots])
                    num_copies += 1
    if not num_copies:
        raise NotRunError("the server has no empty slots")
    apply_table(site, table)
    wait_for_migration(site)
    return f"{num_copies} copies in {len(table)} layers"


def interrupt(site: Site, is_over: threading.Event) -> str:
    """Send latency-sensitive requests one after the other."""
    num_requests = 0
    while not is_over.is_set():
        site.ask(f"def f{num_requests}(x):\n", max_tokens=4, service_class="ls")
        num_requests += 1
    names = ("batch_passes_total", "withdrawals_total", "num_preemptions_total")
    counts = {name: int(sum(site.server.samples(f"moestro:{name}"))) for name in names}
    if not any(counts.values()):
        raise NotRunError("no request was preempted")
    listed = ", ".join(f"{name.removesuffix('_total')} {count}" for name, count in counts.items())
    return f"{num_requests} latency-sensitive requests; {listed}"


def shown_table(site: Site) -> list[list[list[int]]]:
    """Return the experts by layer, by worker that can hold some, and by slot; -1 means an empty slot."""
    status, shown = site.admin("GET", "/admin/placement?arrays=true")
    if status != 200:
        raise NotRunError(shown["error"]["message"])
    return [[layer[worker] for worker in shown["workers"]] for layer in shown["table"]]


def progress(site: Site) -> dict[str, Any]:
    """Return the progress of the present migration, or of the last one."""
    return site.admin("GET", "/admin/placement")[1]["progress"]


def wait_for_migration(site: Site) -> None:
    """Wait until no expert moves.

    Raises:
        NotRunError: The migration failed.
    """
    while (now := progress(site))["is_running"]:
        time.sleep(_PAUSE_S)
    if now["error"]:
        raise NotRunError(f"the migration ended early: {now['error']}")


def apply_table(site: Site, table: list[list[list[int]]]) -> None:
    """Begin to move towards a table. A running migration is waited for."""
    placement = {"physical_to_logical_map": [[expert for slots in layer for expert in slots] for layer in table]}
    while True:
        status, reply = site.admin("POST", "/admin/placement/apply", placement)
        if status in (200, 202):
            return
        if reply["error"]["code"] != "migration_running":
            raise NotRunError(reply["error"]["message"])
        time.sleep(_PAUSE_S)


def shuffled(table: list[list[list[int]]], rng: random.Random) -> list[list[list[int]]]:
    """Return a table in which each layer's filled slots are dealt anew, none of them twice to one worker."""
    return [_dealt(layer, rng) for layer in table]


def _dealt(layer: list[list[int]], rng: random.Random) -> list[list[int]]:
    experts = [expert for slots in layer for expert in slots]
    while True:
        rng.shuffle(experts)
        rest = iter(experts)
        dealt = [[next(rest) for _ in slots] for slots in layer]
        filled = [[expert for expert in slots if expert >= 0] for slots in dealt]
        if all(len(set(each)) == len(each) for each in filled) and all(filled):
            return dealt


# Disturbances that end before the prompts are sent.
_BEFORE = {copy_experts}
FEATURES = (
    Feature("ep", EP),
    Feature("migration", EP, move_experts),
    Feature("copies", (*EP, "--num-redundant-experts", "4"), copy_experts),
    Feature("async", ASYNC),
    Feature("async_copies", (*ASYNC, "--expert-copies", "2")),
    Feature("async_migration", (*ASYNC, "--num-redundant-experts", "4"), move_experts),
    Feature("preemption", ("--mode", "preemptive", "--max-be-wait", "inf"), interrupt, "be"),
    Feature("eviction", (*SCARCE, *QLLM), interrupt, "be"),
)


# --- comparison -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(model: str, flags: Sequence[str], port: int, log: Path) -> Iterator[Site]:
    """Start a server with a model in float32, and stop it afterwards."""
    command = [MOESTRO, "serve", model, "--dtype", "float32", "--port", str(port), "--admin-port", str(port + 1)]
    with started([*command, *flags], port, log, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1") as server:
        yield Site(server, port + 1)


def compare(feature: Feature, site: Site, reference: list[ScoredAnswer]) -> Parity:
    """Answer the prompts with a feature, and compare."""
    parity, is_over = Parity(feature.name), threading.Event()
    try:
        if feature.disturb in _BEFORE:
            parity.notes = feature.disturb(site, is_over)
        with ThreadPoolExecutor(1) as pool:
            disturbing = None
            if feature.disturb is not None and feature.disturb not in _BEFORE:
                disturbing = pool.submit(feature.disturb, site, is_over)
            try:
                found = answers(site, feature.service_class)
            finally:
                is_over.set()
            if disturbing is not None:
                parity.notes = disturbing.result()
    except (NotRunError, OSError) as error:
        parity.why_not = str(error)
        return parity
    for number, (expected, answer) in enumerate(zip(reference, found, strict=True)):
        parity.add(number, expected, answer)
    return parity


def show(rows: list[Parity], console: Console) -> None:
    """Print the table, and every difference and near tie below it."""
    table = Table("feature", "prompts", "tokens", "equal", "near ties", "max |Δ logprob|", "verdict", box=None)
    for row in rows:
        verdict = "equal" if row.holds else "not compared" if row.why_not else "DIFFERS"
        figures = (row.num_prompts, row.num_tokens, row.num_equal, len(row.near_ties))
        table.add_row(row.feature, *map(str, figures), f"{row.max_difference:.1e}", verdict)
    console.print(table)
    for row in rows:
        if row.why_not:
            console.print(f"{row.feature}: not compared: {row.why_not}", markup=False)
        for text in row.differences:
            console.print(f"{row.feature}: {text}", markup=False)
        for prompt, place, gap in row.near_ties:
            console.print(f"{row.feature}: near tie in prompt {prompt} at token {place}, gap {gap:.1e}", markup=False)
        if row.notes:
            console.print(f"{row.feature}: {row.notes}", markup=False)


def main() -> int:
    """Compare all features, and return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("model", nargs="?", default="moestro-demo", help="directory or hub id of a checkpoint")
    names = [feature.name for feature in FEATURES]
    parser.add_argument("--features", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--port", type=int, default=8350, help="first of two free ports")
    options = parser.parse_args()
    conditions, console, rows = run_record("measured"), Console(soft_wrap=True), []
    with tempfile.TemporaryDirectory(prefix="moestro-accuracy-") as work:
        log = Path(work) / "server.log"
        with serving(options.model, (), options.port, log) as site:
            reference = answers(site, "ls")
            again = Parity("fused, again")
            for number, pair in enumerate(zip(reference, answers(site, "ls"), strict=True)):
                again.add(number, *pair)
            rows.append(again)
        for feature in (each for each in FEATURES if each.name in options.features):
            try:
                with serving(options.model, feature.flags, options.port, log) as site:
                    rows.append(compare(feature, site, reference))
            except AssertionError as error:
                rows.append(Parity(feature.name, why_not=f"{error}: {log.read_text()[-400:]}"))
            console.print(f"{feature.name}: {'equal' if rows[-1].holds else 'not equal'}")
    show(rows, console)
    is_equal = all(row.holds for row in rows)
    figures = [asdict(row) | {"holds": row.holds} for row in rows]
    save(options.json, conditions, {"model": options.model, "max_tokens": MAX_TOKENS, "features": figures})
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
