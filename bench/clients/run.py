"""Runs real, unmodified clients against `moestro serve` and `moestro route`, each in a separate environment.

    python bench/clients/run.py --work /tmp/clients --json bench/results/serving/clients.json [--only openai litellm]
        [--jobs 4] [--vllm VENV/bin/python]
    python tools/reference_tables.py

The first run installs the clients' packages below `--work`: a gigabyte, without vLLM. `npm` is needed for Vercel's AI
SDK; `vllm bench serve` runs where `--vllm` names the interpreter of an environment that has vLLM. With `--only`, the
other clients' results in the JSON file are kept.

Every case runs directly and through the router. The server has the demo model, whose 8 million parameters write Python
alone: what a client asks for as JSON has bounded parts, so that structured output decides its form.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from moestro.config.run_record import run_record

sys.path.insert(0, str(Path(__file__).parents[1]))
import load_tools
from environments import (
    AIPERF,
    GUIDELLM,
    LM_EVAL,
    SCRIPTED,
    VERCEL,
    Client,
    own_environment,
    python_of,
    vercel_directory,
    version_of,
)
from shared.results import make_parser, package_version
from shared.server import MOESTRO, moestro, started

MODEL, PORT, ROUTER_PORT = "moestro-demo", 8190, 8192
FLAGS = ("--tool-call-parser", "hermes")
CASES = Path(__file__).parent / "cases"
TIMEOUT_S = 1200

Result = dict[str, object]  # {"case", "passed", "reason"}
LoadTool = Callable[[Path, str, str, Path], None]
LOAD_TOOLS: dict[Client, dict[str, LoadTool]] = {
    AIPERF: {"profile, streamed chats": load_tools.aiperf},
    GUIDELLM: {"benchmark, synthetic prompts": load_tools.guidellm},
    LM_EVAL: {
        "local-completions: log likelihoods and generation": load_tools.lm_eval_completions,
        "local-chat-completions: generation": load_tools.lm_eval_chat,
    },
}
VLLM = Client("vllm bench serve", ("vllm",))
EVERY = (*SCRIPTED, VERCEL, *LOAD_TOOLS, VLLM)  # in the order of the table


@dataclass(frozen=True)
class Bench:
    """Environments of the clients.

    Attributes:
        work: Directory of the environments.
        vllm: Interpreter of an environment with vLLM; None leaves it out.
    """

    work: Path
    vllm: Path | None

    def result(self, client: Client, direct_url: str, routed_url: str) -> dict[str, Any]:
        """Return a client's version, and one row for each case with both results and the reason of a failure."""
        version = self.version(client)  # Installs the client, before two threads need it.
        with ThreadPoolExecutor(2) as pool:
            direct, routed = pool.map(self.run, (client, client), (direct_url, routed_url))
        through = {result["case"]: result for result in routed}
        rows = []
        for result in direct:
            other = through.get(result["case"], {"passed": False, "reason": "not run"})
            row = {"case": result["case"], "direct": result["passed"], "routed": other["passed"]}
            rows.append({**row, "reason": result["reason"] or other["reason"]})
        return {"version": version, "cases": rows}

    def run(self, client: Client, url: str) -> list[Result]:
        """Return the results of a client's cases at the server `url`."""
        if client is VERCEL:
            return _printed(["node", "cases.mjs", url, MODEL], vercel_directory(self.work))
        if client is VLLM:
            assert self.vllm is not None
            return _load({"completions and chats": load_tools.vllm_bench}, self.vllm, url)
        python = python_of(client, self.work)
        if client.script:
            return _printed([str(python), str(CASES / client.script), url, MODEL], CASES)
        return _load(LOAD_TOOLS[client], python, url)

    def version(self, client: Client) -> str:
        """Return the version of a client; installs the client if it is missing."""
        if client is VLLM:
            assert self.vllm is not None
            return package_version(self.vllm, "vllm")
        return version_of(client, self.work)


def _printed(command: list[str], directory: Path) -> list[Result]:
    """Run a script of cases; return what it prints, and a failed case if it ends early."""
    done = subprocess.run(
        command, cwd=directory, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=own_environment()
    )
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    if done.returncode:
        results.append({"case": "script", "passed": False, "reason": done.stderr[-600:]})
    return results


def _load(cases: dict[str, LoadTool], python: Path, url: str) -> list[Result]:
    results: list[Result] = []
    for name, run in cases.items():
        reason = ""
        with tempfile.TemporaryDirectory() as work:
            try:
                run(python, url, MODEL, Path(work))
            except (AssertionError, KeyError, StopIteration, subprocess.TimeoutExpired) as error:
                reason = f"{type(error).__name__}: {error}"
        results.append({"case": name, "passed": not reason, "reason": reason})
    return results


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--jobs", type=int, default=1, help="clients that run at once")
    parser.add_argument("--vllm", type=Path)
    args = parser.parse_args()
    bench = Bench(args.work.resolve(), args.vllm)
    conditions = msgspec.to_builtins(run_record("measured"))
    earlier = json.loads(args.json.read_text()) if args.only and args.json and args.json.exists() else {}
    found: dict[str, object] = earlier.get("clients", {})
    offered = {client.name: client for client in EVERY if args.vllm or client is not VLLM}
    if unknown := set(args.only) - set(offered):
        parser.error(f"--only: no client is called {', '.join(sorted(unknown))}; choose among {', '.join(offered)}")
    chosen = [offered[name] for name in args.only or offered]
    result = {"conditions": conditions, "model": MODEL, "flags": FLAGS, "clients": found}
    with moestro(PORT, *FLAGS) as server:
        route = [MOESTRO, "route", "--engine", server.url, "--port", str(ROUTER_PORT), "--admin-port", "0"]
        with started(route, ROUTER_PORT) as router:
            with ThreadPoolExecutor(args.jobs) as pool:
                jobs = {pool.submit(bench.result, client, server.url, router.url): client for client in chosen}
                for job in as_completed(jobs):
                    client = jobs[job]
                    found[client.name] = job.result()
                    _show(client, job.result()["cases"])
                    result["clients"] = {each.name: found[each.name] for each in EVERY if each.name in found}
                    if args.json:  # After each client, because a run takes long.
                        args.json.write_text(json.dumps(result, indent=1) + "\n")
            server.wait_until_idle()


def _show(client: Client, rows: list[dict[str, object]]) -> None:
    passed = sum(bool(row["direct"] and row["routed"]) for row in rows)
    print(f"{client.name}: {passed} of {len(rows)} pass", flush=True)
    for row in rows:
        if row["reason"]:
            print(f"  {row}", flush=True)


if __name__ == "__main__":
    main()
