"""`moestro repro`: papers' tables, made again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from moestro.cli.app import app
from moestro.cli.extras import install_command, is_installed

repro = App(name="repro", help="Make a paper's tables again, on virtual time, and set its claims beside what is found.")
app.command(repro)


@repro.command
def lmetric(
    *,
    quick: Annotated[bool, Parameter(negative=())] = False,
    loads: tuple[str, ...] | None = None,
    num_requests: int | None = None,
    traces: Path | None = None,
    out: Path | None = None,
) -> None:
    """LMetric: 16 H20 engines with Qwen3-30B-A3B, every routing policy, five rates up to 90 % of saturation.

    Parameters
    ----------
    quick
        One load, two rates and seven policies: under a minute, to see what it does.
    loads
        Only these: chat, api_agent, coder, tool_agent (generated sessions), mooncake_conversation, mooncake_synthetic.
    num_requests
        Of each load; more make steadier figures, and take longer.
    traces
        A directory with mooncake_conversation.jsonl and mooncake_synthetic.jsonl (or .jsonl.zst), which Mooncake's
        authors publish. Without it there are generated sessions alone.
    out
        A directory for lmetric.json and, where matplotlib is installed, pictures. What was found of each load is kept
        there at once, as lmetric.LOAD.json, and not made again by the same version: a run that was stopped goes on, and
        loads that were made by several processes come together in one that asks for all of them.
    """
    from rich.console import Console

    from moestro.repro.lmetric.experiment import QUICK, Plan
    from moestro.repro.lmetric.runner import reproduce_lmetric, save

    console = Console()
    plan = QUICK if quick else Plan()
    plan = replace(plan, sources=loads or plan.sources, num_requests=num_requests or plan.num_requests)
    found = reproduce_lmetric(console, plan, traces, out)
    if out is None:
        return
    console.print(f"written: {save(found, out, 'lmetric')}")
    if not is_installed("plots"):
        console.print(f"no pictures: {install_command('plots')}")
        return
    from moestro.repro.lmetric.draw import save_pictures

    for path in save_pictures(found.findings, out):
        console.print(f"written: {path}")


@repro.command
def qllm(
    *,
    quick: Annotated[bool, Parameter(negative=())] = False,
    loads: tuple[str, ...] | None = None,
    trace: Path | None = None,
    out: Path | None = None,
) -> None:
    """QLLM: Mixtral 8x7B in 4 bits on an A100, a fifth of the requests latency-sensitive, 1 to 10 a second.

    Run-to-completion batches, continuous batching, priorities between iterations, and preemption at every expert call,
    without and with ageing; under five seeds.

    Parameters
    ----------
    quick
        One seed, fewer requests and rates: under a minute, to see what it does.
    loads
        Only these: ten_tokens, sharegpt_answers.
    trace
        A file of request lengths to draw from, in any form that moestro bench reads. Unset: lengths are generated with
        ShareGPT's published means.
    out
        A directory for qllm.json and, where matplotlib is installed, pictures.
    """
    from rich.console import Console

    from moestro.repro.lmetric.reporting import write_result
    from moestro.repro.qllm.experiment import QUICK, Plan, chosen
    from moestro.repro.qllm.runner import reproduce_qllm

    console = Console()
    found = reproduce_qllm(console, chosen(QUICK if quick else Plan(), loads), trace)
    if out is None:
        return
    write_result(found, out / "qllm.json")
    console.print(f"written: {out / 'qllm.json'}")
    if not is_installed("plots"):
        console.print(f"no pictures: {install_command('plots')}")
        return
    from moestro.repro.qllm.draw import save_pictures

    for path in save_pictures(found.findings, out):
        console.print(f"written: {path}")
