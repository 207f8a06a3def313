"""The systems whose predictions are judged, each started with its own flags."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from accuracy.loads import HeldOutLoad
from shared.models import DEMO, make_dense_model
from shared.server import Server, free_port, moestro, started


@dataclass(frozen=True, kw_only=True)
class System:
    """A system.

    Attributes:
        title: words for the table.
        kind: kind of evidence.
        flags: of its server.
        unplanned: those of them, in the form of the server's command, that no plan decides.
        has_choices: whether it has the policies and engine counts of the loads.
        is_vllm: whether vLLM serves, or else Moestro.
        is_dense: whether the model is a dense one of random weights, or else the demo model.
    """

    title: str
    kind: str
    flags: tuple[str, ...]
    unplanned: tuple[str, ...] = ()
    has_choices: bool = True
    is_vllm: bool = False
    is_dense: bool = False


_PACED = ("--device", "paced:h20", "--paced-arithmetic", "none", "--pace-dilation", "4")
_VLLM_CACHE = ("--num-gpu-blocks-override", "450", "--block-size", "32")
_VLLM_ALL = (
    *("--served-model-name", "m", "--dtype", "bfloat16", "--enforce-eager", "--enable-prefix-caching"),
    "--enable-prompt-tokens-details",
)
_OF_VLLM: dict[str, Any] = {
    "kind": "measured",
    "unplanned": ("--dtype", "bfloat16", "--enforce-eager", "--enable-prompt-tokens-details"),
    "has_choices": False,
    "is_vllm": True,
}
_WIDE = ("--max-num-seqs", "16", "--max-num-batched-tokens", "1024", "--max-model-len", "1024")
_LIMITS = ("--max-num-seqs", "8", "--max-num-batched-tokens", "256", "--max-model-len", "1024")

SYSTEMS = {
    "moestro_paced": System(
        title="moestro serve, paced H20, 4 times as slow",
        kind="paced",
        flags=(*_PACED, *_LIMITS, "--num-gpu-blocks-override", "900"),
        unplanned=_PACED,
    ),
    "moestro_preemptive": System(
        title="moestro serve --mode preemptive, paced H20, 4 times as slow",
        kind="paced",
        flags=(*_PACED, *_LIMITS, "--num-gpu-blocks-override", "900", "--mode", "preemptive"),
    ),
    "moestro_cpu": System(
        title="moestro serve on one core, demo model",
        kind="measured",
        flags=(*_LIMITS, "--num-gpu-blocks-override", "900"),
    ),
    "vllm_cpu": System(
        title="vLLM 0.32 on one core, demo model",
        flags=(*_LIMITS, *_VLLM_CACHE),
        **_OF_VLLM,
    ),
    "vllm_cpu_wide": System(
        title="vLLM 0.32, demo model, 16 sequences and 1,024 tokens a step",
        flags=(*_WIDE, *_VLLM_CACHE),
        **_OF_VLLM,
    ),
    "vllm_cpu_dense": System(
        title="vLLM 0.32 on one core, dense model",
        flags=(*_LIMITS, *_VLLM_CACHE),
        is_dense=True,
        **_OF_VLLM,
    ),
    "vllm_cpu_dense_wide": System(
        title="vLLM 0.32, dense model, 16 sequences and 1,024 tokens a step",
        flags=(*_WIDE, *_VLLM_CACHE),
        is_dense=True,
        **_OF_VLLM,
    ),
}


def model_of(name: str, work: Path) -> Path:
    """The directory of a system's model, which is made in `work` if it is not part of the package."""
    return make_dense_model(work / "dense") if SYSTEMS[name].is_dense else DEMO


@contextlib.contextmanager
def running(name: str, load: HeldOutLoad | None, vllm: str | None, log: Path) -> Iterator[Server]:
    """Start a system as a load wants it; None: as it is calibrated."""
    system, port = SYSTEMS[name], free_port()
    if system.is_vllm:
        assert vllm is not None, "give --vllm, the command of an environment with vllm-cpu"
        starting = vllm_server(vllm, model_of(name, log.parent), system.flags, log)
    else:
        flags = list(system.flags)
        if load is not None and load.policy is not None:
            flags += ["--batch-policy", load.policy]
        if load is not None and load.count > 1:
            flags += ["--engines", str(load.count), "--route-policy", "round_robin"]
        starting = moestro(port, *flags, "--log-level", "warning", log=log, OMP_NUM_THREADS="1")
    with going_first(starting) as server:
        yield server


def vllm_server(
    program: str, model: Path, flags: tuple[str, ...], log: Path, **environment: str
) -> contextlib.AbstractContextManager[Server]:
    """A server of vLLM on a CPU, with its flags beside those that all have."""
    port, path = free_port(), f"{Path(program).parent}:{os.environ['PATH']}"
    command = [program, "serve", str(model), "--host", "127.0.0.1", "--port", str(port), *_VLLM_ALL, *flags]
    fixed = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "PATH": path}
    return started(command, port, log, **fixed, **environment)


@contextlib.contextmanager
def going_first(starting: contextlib.AbstractContextManager[Server]) -> Iterator[Server]:
    """Run a server whose threads `go_first`."""
    with starting as server:
        assert server.process is not None
        parent = psutil.Process(server.process.pid)
        for process in (parent, *parent.children(recursive=True)):
            for thread in process.threads():
                go_first(thread.id)
        yield server


def go_first(thread: int = 0) -> None:
    """Schedule a thread before other processes, if MOESTRO_BENCH_FIRST is set.

    On a machine with other jobs, what is timed then does not wait for them. On a quiet one it does harm: threads of
    this priority take turns of 100 ms, so that a server's processes wait for each other and for the client.
    """
    if not os.environ.get("MOESTRO_BENCH_FIRST"):
        return
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(1))
