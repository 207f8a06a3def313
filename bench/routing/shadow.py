"""Predicts by a shadow what a switch of routers changes, switches, and measures it.

    python bench/routing/shadow.py --json bench/results/routing/shadow.json [--work DIR]
    python bench/routing/shadow.py --vllm /path/to/venv/bin/vllm --dilation 1.5 --json ...

Two servers, paced ones or those of vLLM on a core each, stand behind nginx, which sends requests in turn, with
`moestro route --shadow` beside it. Each load is sent once through nginx and, to fresh servers, once through `moestro
route` with the shadow's policy. The change that `moestro sim --replay` predicts from the shadow's record is compared
with the measured one. Prices are those of `moestro calibrate --server` on one of the servers. With --work, parts that
are there are kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moestro.config.run_record import run_record

sys.path.insert(0, str(Path(__file__).parents[1]))
from accuracy.run import VOCABULARY, figures, run
from accuracy.systems import SYSTEMS, go_first, going_first, vllm_server
from shared.models import DEMO, ROOT
from shared.results import make_parser, save
from shared.server import MOESTRO, Server, free_port, moestro, started

POLICY, HASHED = "moestro", 16
FLAGS, DILATION = SYSTEMS["moestro_paced"].flags, 4.0
READING = ("--tokenizer", str(DEMO), "--metrics-interval", "0.5")
PATIENCE = ("--hang-timeout", "60", "--probe-timeout", "30")  # A busy machine is not taken for a hung engine.
NUM_TRIES, MOST_LATE_MS = 3, 500.0
SETTLE_S = 1.5  # in which the shadow reads the last line and the last counts


@dataclass(frozen=True, kw_only=True)
class SwitchLoad:
    """A load.

    Attributes:
        rate: requests a second at a dilation of 4, Poisson.
        num_requests: requests.
        prompts, answers: least and most tokens; of a conversation, the tokens of a turn.
        num_groups: groups of requests whose prompts begin alike, or conversations; 0: all prompts differ.
        shared: tokens of that beginning.
        most_turns: turns after which a conversation begins anew; 0: groups share their beginning alone.
    """

    rate: float
    num_requests: int = 120
    prompts: tuple[int, int]
    answers: tuple[int, int]
    num_groups: int = 0
    shared: int = 0
    most_turns: int = 0


LOADS = {
    "documents": SwitchLoad(rate=2.6, prompts=(32, 160), answers=(4, 24), num_groups=40, shared=512),
    "conversations": SwitchLoad(rate=2.6, prompts=(64, 128), answers=(4, 24), num_groups=24, shared=128, most_turns=5),
    "all different": SwitchLoad(rate=3.4, prompts=(16, 700), answers=(4, 40)),
}


def write_load(path: Path, load: SwitchLoad, seed: int, dilation: float) -> None:
    """Write the requests as a trace with the names of their prompts' blocks."""
    rng = np.random.default_rng([seed, load.num_requests])
    times = np.cumsum(rng.exponential(dilation / DILATION / load.rate, load.num_requests))
    beginnings: dict[int, list[int]] = {}  # blocks of each group, or of each conversation so far
    longest = load.shared + load.most_turns * load.prompts[1]
    fresh = iter(range(1, 1 << 30))
    lines = []
    for row in range(load.num_requests):
        num_own = int(rng.integers(*load.prompts, endpoint=True))
        group = int(rng.integers(load.num_groups)) if load.num_groups else row
        common = beginnings.get(group)
        if common is None or (load.most_turns and len(common) * HASHED > longest):
            common = [next(fresh) for _ in range(load.shared // HASHED)]
        own = [next(fresh) for _ in range(-(-num_own // HASHED))]
        beginnings[group] = common + own[:-1] if load.most_turns else common
        line = {"chat_id": row, "parent_chat_id": -1, "timestamp": round(float(times[row]), 6)}
        line |= {"input_length": len(common) * HASHED + num_own, "hash_ids": common + own}
        lines.append(json.dumps(line | {"output_length": int(rng.integers(*load.answers, endpoint=True))}) + "\n")
    path.write_text("".join(lines))


@dataclass(frozen=True, kw_only=True)
class Engines:
    """The servers behind the routers, all alike.

    Attributes:
        title, kind: words and kind of evidence for the result.
        flags: of a server.
        block_size: tokens of a block in its prefix cache.
        prefix: that of its metrics.
        start: function of a server's number and its log.
    """

    title: str
    kind: str
    flags: tuple[str, ...]
    block_size: int
    prefix: str
    start: Callable[[int, Path], contextlib.AbstractContextManager[Server]]

    def one(self, number: int, log: Path) -> contextlib.AbstractContextManager[Server]:
        """Run a server."""
        return going_first(self.start(number, log))

    @contextlib.contextmanager
    def two(self, work: Path) -> Iterator[list[Server]]:
        """Run two servers."""
        with self.one(0, work / "engine-0.log") as first, self.one(1, work / "engine-1.log") as second:
            yield [first, second]


def paced(dilation: float) -> Engines:
    """Servers with modelled durations, as many times longer."""
    flags = list(FLAGS)
    flags[flags.index("--pace-dilation") + 1] = f"{dilation:g}"

    def start(_: int, log: Path) -> contextlib.AbstractContextManager[Server]:
        return moestro(free_port(), *flags, "--log-level", "warning", log=log, OMP_NUM_THREADS="1")

    title = f"two moestro serve, paced H20, {dilation:g} times as slow"
    return Engines(title=title, kind="paced", flags=tuple(flags), block_size=HASHED, prefix="moestro", start=start)


def vllm(program: str) -> Engines:
    """Servers of vLLM with the demo model, which compute on a core each."""

    flags = SYSTEMS["vllm_cpu"].flags

    def start(number: int, log: Path) -> contextlib.AbstractContextManager[Server]:
        return vllm_server(program, DEMO, flags, log, VLLM_CPU_OMP_THREADS_BIND=str(number))

    title = "two servers of vLLM 0.32 on the CPU, demo model"
    return Engines(title=title, kind="measured", flags=flags, block_size=32, prefix="vllm", start=start)


def calibrate(work: Path, engines: Engines, seconds: float) -> None:
    """Describe one of the servers in engine.json and engine.toml, unless they are there."""
    if (work / "engine.toml").exists():
        return
    bounds = ["--seconds", str(seconds), "--max-concurrency", "16", "--max-prompt-tokens", "900"]
    with engines.one(0, work / "calibrate.log") as server:
        run("calibrate", "--server", server.url, *bounds, "--out", str(work / "engine.json"))


@contextlib.contextmanager
def nginx(work: Path, urls: list[str], shadow_port: int) -> Iterator[str]:
    """Run nginx by its file in deploy/, and yield its URL."""
    port, ports = free_port(), [url.rpartition(":")[2] for url in urls]
    text = (ROOT / "deploy" / "proxies" / "nginx_shadow.conf").read_text()
    for known, number in (("8001", ports[0]), ("8002", ports[1]), ("8080", shadow_port)):
        text = text.replace(f"127.0.0.1:{known}", f"127.0.0.1:{number}")
    text = re.sub(r"/var/log/nginx/moestro.log", str(work / "access.log"), text)
    text = text.replace("listen 8000;", f"listen 127.0.0.1:{port};")
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    folders = "".join(f"{kind}_temp_path {work}/{kind};\n" for kind in kinds)
    user = "user root;\n" if os.geteuid() == 0 else ""
    whole = f"{user}daemon off;\npid {work}/nginx.pid;\nevents {{}}\nhttp {{\n{folders}{text}\n}}\n"
    (work / "nginx.conf").write_text(whole)
    command = ["nginx", "-c", str(work / "nginx.conf"), "-e", str(work / "nginx.log")]
    with started(command, port) as server:
        yield server.url


@dataclass(frozen=True, kw_only=True)
class Switch:
    """One load that is sent before and after the switch.

    Attributes:
        work: folder of its files.
        engines: the servers.
        load, seed: the load, and the seed of its requests.
        dilation: factor on the times between them.
    """

    work: Path
    engines: Engines
    load: SwitchLoad
    seed: int
    dilation: float

    def in_use(self) -> dict:
        """Send the load through nginx beside a new shadow."""
        work = self.work
        work.mkdir(parents=True, exist_ok=True)
        write_load(work / "load.jsonl", self.load, self.seed, self.dilation)
        for name in ("access.log", "shadow.jsonl"):
            (work / name).unlink(missing_ok=True)
        watch = ("--shadow", "--access-log", str(work / "access.log"), "--record", str(work / "shadow.jsonl"))
        with self.engines.two(work) as servers:
            urls = [each.url for each in servers]
            with self._router(urls, *watch) as shadow, nginx(work, urls, int(shadow.url.rpartition(":")[2])) as url:
                found = self._send(url, servers, "before")
                time.sleep(SETTLE_S)
        return found

    def switched(self) -> dict:
        """Send the same load to new servers through the router whose shadow was there."""
        with self.engines.two(self.work) as servers, self._router([each.url for each in servers]) as made:
            return self._send(made.url, servers, "after")

    def _router(self, urls: list[str], *flags: str) -> contextlib.AbstractContextManager[Server]:
        """Run `moestro route` before the servers, or beside them."""
        port, engines = free_port(), [part for url in urls for part in ("--engine", url)]
        command = [MOESTRO, "route", "--port", str(port), "--admin-port", "0", "--route-policy", POLICY, *engines]
        command += [*READING, "--block-size", str(self.engines.block_size), *PATIENCE, "--log-level", "warning", *flags]
        return started(command, port, self.work / "router.log", OMP_NUM_THREADS="1")

    def _send(self, url: str, servers: list[Server], name: str) -> dict:
        """Send the load, and return its figures, as the client and as the servers saw them."""
        out = self.work / f"{name}.bench.json"
        trace = ["--dataset-name", "trace", "--dataset-path", str(self.work / "load.jsonl"), "--seed", str(self.seed)]
        more = ["--vocab-size", str(VOCABULARY), "--temperature", "1", "--num-warmups", "0", "--json", str(out)]
        run("bench", "--base-url", url, *trace, *more)
        report = json.loads(out.read_text())["report"]
        assert not report["failures"], report["failures"]
        ttft = f"{self.engines.prefix}:time_to_first_token_seconds"
        sums = [sum(sum(each.samples(f"{ttft}_{end}")) for each in servers) for end in ("sum", "count")]
        late_ms = report["send_lateness"]["max"]
        return figures(report) | {"client_late_ms": late_ms, "ttft_of_engines_ms": sums[0] / sums[1] * 1e3}


def on_time(measure: Callable[[], dict]) -> dict:
    """Measure again, twice at most, while the machine has kept the client from sending on time."""
    for number in range(NUM_TRIES):
        found = measure() | {"num_tries": number + 1}
        if found["client_late_ms"] <= MOST_LATE_MS:
            break
    return found


def before_and_after(switch: Switch, engine: Path) -> dict:
    """Predict, switch and measure one load."""
    work, before = switch.work, on_time(switch.in_use)
    run("sim", "--replay", str(work / "shadow.jsonl"), "--engines", str(engine), "--json", str(work / "report.json"))
    report = json.loads((work / "report.json").read_text())
    (groups,) = report["changes"].values()
    after = on_time(switch.switched)
    # The time of the routers themselves is not predicted; on a busy machine it is not small.
    measured = after["ttft_of_engines_ms"] / before["ttft_of_engines_ms"]
    predicted = 1 + groups[0]["ttft_ms"]["change"]
    return {
        "seed": switch.seed,
        "before": before,
        "after": after,
        "predicted": groups[0],
        "ttft_ratio": {"measured": measured, "predicted": predicted, "error": predicted / measured - 1},
        "hit_ratio": {"measured": after["hit_ratio"], "predicted": groups[0]["hit_ratio"]["predicted"]},
        "notes": report["notes"],
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--loads", nargs="*", choices=LOADS, default=list(LOADS), help="these alone")
    parser.add_argument("--seeds", type=int, nargs="*", default=[101, 102])
    parser.add_argument("--work", type=Path, help="keep parts here, of one kind of servers and one dilation")
    parser.add_argument("--seconds", type=float, default=100.0, help="of the calibration")
    parser.add_argument(
        "--dilation",
        type=float,
        default=DILATION,
        help="factor on the times between requests, and on modelled durations",
    )
    parser.add_argument("--vllm", help="the command `vllm` of an environment with vllm-cpu, in place of paced servers")
    parser.add_argument("--note", default="", help="remark about the machine")
    args = parser.parse_args()
    assert shutil.which("nginx"), "nginx is not installed"
    engines = vllm(args.vllm) if args.vllm else paced(args.dilation)
    conditions = run_record(f"{engines.kind} and simulated", note=args.note)
    with tempfile.TemporaryDirectory() as directory:
        work = args.work or Path(directory)
        work.mkdir(parents=True, exist_ok=True)
        go_first()
        calibrate(work, engines, args.seconds)
        rows = []
        for title in args.loads:
            for seed in args.seeds:
                part = work / f"{title.replace(' ', '_')}-{seed}"
                if not (part / "row.json").exists():
                    switch = Switch(work=part, engines=engines, load=LOADS[title], seed=seed, dilation=args.dilation)
                    row = {"load": title, **before_and_after(switch, work / "engine.toml")}
                    (part / "row.json").write_text(json.dumps(row))
                rows.append(json.loads((part / "row.json").read_text()))
                shown = {key: round(value, 3) for key, value in rows[-1]["ttft_ratio"].items()}
                print(f"{title}, {seed}: TTFT {shown}, hits {rows[-1]['hit_ratio']}", flush=True)
    save(args.json, conditions, {"system": engines.title, "flags": engines.flags, "policy": POLICY, "rows": rows})


if __name__ == "__main__":
    main()
