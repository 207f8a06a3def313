"""The servers of `async_ep.py`: runs one load on each, and reads what its workers counted meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moestro.server.figures.statistics import MAX_LATE_SHARE

sys.path.insert(0, str(Path(__file__).parents[1]))
from serving.async_ep_load import Load, arguments
from shared.server import MOESTRO, Server, started

_REPORT_S = 1.3  # workers report once a second, and for the last time within a second after their last change
_LOOK_S = 0.25  # between two looks at the workers during a run
_TICKS_OF = {"items": "num_items", "item_ns": "item_ns", "late_ns": "late_ns", "messages": "num_messages"}


@dataclass(frozen=True)
class System:
    """One server.

    Attributes:
        name: name in the result.
        mode: `fused`, `ep` or `async`.
        flags: flags of `moestro serve`.
        num_engines: engines behind its API.
    """

    name: str
    mode: str
    flags: tuple[str, ...]
    num_engines: int


@dataclass(frozen=True)
class Running:
    """A server that runs, and the port of its operators."""

    system: System
    server: Server
    admin_port: int

    def workers(self) -> list[dict]:
        """Return name and figures of each worker of a group; empty for other modes."""
        if self.system.mode != "async":
            return []
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}/admin/workers", timeout=60) as answer:
            return [each for each in json.load(answer)["workers"] if each["figures"] is not None]

    def engines(self) -> list[dict[str, float]]:
        """Return the counts of the paced device of each engine."""
        names = ("paced_items", "paced_item_seconds", "paced_late_seconds", "paced_wait_seconds")
        columns = [self.server.samples(f"moestro:{name}_total") for name in names]
        keys = ("num_items", "item_ns", "late_ns", "wait_ns")
        scales = (1, 1e9, 1e9, 1e9)
        return [
            {key: value * scale for key, value, scale in zip(keys, row, scales, strict=True)}
            for row in zip(*columns, strict=True)
        ]

    def cpu(self) -> dict[str, dict[str, float]]:
        """Return CPU-seconds of each worker process by its name: of its main thread, and of its other threads."""
        found = {}
        for process in self.server.engines():
            threads = {thread.id: thread.user_time + thread.system_time for thread in process.threads()}
            main_s = threads.pop(process.pid)
            found[" ".join(process.cmdline()[-2:])] = {"main_s": main_s, "other_s": sum(threads.values())}
        return found


@contextmanager
def serving(system: System, port: int, work: Path) -> Iterator[Running]:
    """Start the server of a system, and stop it afterwards."""
    command = [MOESTRO, "serve", *system.flags, "--port", str(port), "--log-level", "warning"]
    if system.mode == "async":
        command += ["--mode", "async", "--no-standby", "--admin-port", str(port + 1)]
    elif system.mode == "ep":
        command += ["--mode", "ep"]
    log = work / f"{system.name.replace(' ', '-').replace('+', '-')}.log"
    with started(command, port, log, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1") as server:
        yield Running(system, server, port + 1)


def measure(running: Running, load: Load) -> dict[str, object]:
    """Send a load, and return the client's figures, the workers' counts, and their queues over time."""
    client = subprocess.Popen(
        arguments(load, running.server.url), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert client.stdin
    assert client.stdout
    with client:
        warm = client.stdout.readline()
        assert warm, "the client failed; its error is above"
        assert client.stdout.readline() == "ready\n"
        time.sleep(_REPORT_S)
        before, engines, cpu = running.workers(), running.engines(), running.cpu()
        client.stdin.write("\n")
        client.stdin.flush()
        looks, began = [], time.monotonic()
        while client.poll() is None:
            looks.append((time.monotonic() - began, running.workers()))
            time.sleep(_LOOK_S)
        found = json.loads(client.stdout.readline())
    cpu = {
        name: {key: seconds - cpu[name][key] for key, seconds in times.items()} for name, times in running.cpu().items()
    }
    time.sleep(_REPORT_S)
    gains = gained(before, running.workers()) if before else _gained_by_engines(engines, running.engines())
    return {**found, "workers": gains, "cpu": cpu, "queues": _queues(looks)}


def gained(before: list[dict], after: list[dict]) -> dict[str, dict[str, float]]:
    """Return what each worker of a group counted between two looks, by its name."""
    found = {}
    for old, now in zip(before, after, strict=True):
        past, present = old["figures"], now["figures"]
        figures = {key: present[key] - past[key] for key in ("idle_ns", "lived_ns")}
        for key in ("num_sent", "sent_bytes"):
            figures[key] = sum(present[key]) - sum(past[key])
        if present["pace"] is not None:
            pace, was = present["pace"], past["pace"]
            figures |= {key: pace.get(key, 0) - was.get(key, 0) for key in pace if key != "dilation"}
        found[now["name"]] = figures
    return found


def _gained_by_engines(before: list[dict], after: list[dict]) -> dict[str, dict[str, float]]:
    pairs = enumerate(zip(before, after, strict=True))
    return {f"engine {engine}": {key: now[key] - old[key] for key in now} for engine, (old, now) in pairs}


def _queues(looks: list[tuple[float, list[dict]]]) -> dict[str, list]:
    """Return the depth of the queues of each layer at each look, the mean of the workers of each kind."""
    found: dict[str, list] = {"at_s": [], "attention": [], "experts": []}
    for at_s, workers in looks:
        if workers:
            found["at_s"].append(round(at_s, 2))
            for kind in ("attention", "experts"):
                depths = [each["figures"]["num_waiting"] for each in workers if each["kind"] == kind]
                mean = [sum(layer) / len(depths) for layer in zip(*depths, strict=True)]
                found[kind].append([round(depth, 1) for depth in mean])
    return found


def lateness(workers: dict[str, dict[str, float]]) -> dict[str, object]:
    """Return the worst lateness of a worker over the mean duration of its items, and whether the run is valid."""
    worst = 0.0
    for figures in workers.values():
        item_ns = figures["item_ns"] / max(figures["num_items"], 1)
        late_ns = figures["late_ns"] / max(figures["num_items"], 1)
        message_ns = figures.get("message_late_ns", 0) / max(figures.get("num_messages", 0), 1)
        worst = max(worst, max(late_ns, message_ns) / item_ns if item_ns else 0.0)
    return {"worst_late_share": worst, "is_valid": worst <= MAX_LATE_SHARE}
