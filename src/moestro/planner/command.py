"""The commands that start a deployment with our server."""

from __future__ import annotations

from pathlib import Path

from moestro.cost.settings import PACED
from moestro.planner.simulated import STEP_POLICY, FittingDivision

_PORT = 8000


def serve_arguments(fitting: FittingDivision, num_requests: int) -> list[str]:
    """Return the arguments of `moestro serve` for one group of a deployment that the server runs.

    A network that is named by its sizes alone has no weights, so its command starts paced devices.

    Args:
        fitting: the deployment.
        num_requests: requests in progress in all groups.
    """
    question, division = fitting.question, fitting.division
    assert division.is_served, f"moestro serve cannot run {division.title}"
    limits, block_size = fitting.limits(num_requests), question.settings.search.block_size
    kv_bytes = fitting.memory.num_blocks * block_size * question.network.kv_bytes_per_token
    arguments = [
        "moestro", "serve", question.settings.model,
        *_mode_arguments(fitting),
        "--max-num-seqs", str(limits.max_num_seqs),
        "--max-num-batched-tokens", str(limits.max_num_batched_tokens),
        "--kv-cache-memory-bytes", str(kv_bytes),
        "--block-size", str(block_size),
        "--max-model-len", str(min(question.lengths.longest_requested, fitting.memory.kv_tokens)),
    ]  # fmt: skip
    if Path(question.settings.model).expanduser().exists():
        return [*arguments, "--device", "cuda"]
    link = ["--paced-link", question.within.name] if division.mode != "fused" else []
    return [*arguments, "--device", f"{PACED}{question.gpu.name}", "--paced-arithmetic", "none", *link]


def _mode_arguments(fitting: FittingDivision) -> list[str]:
    division = fitting.division
    if division.mode == "fused":
        return ["--mode", "fused", "--engines", str(division.num_groups)]
    if division.mode == "ep":
        return ["--mode", "ep", "--engines", str(division.gpus_per_group)]
    return [
        "--mode", "async", "--attention", str(division.num_attention_workers),
        "--experts", str(division.num_expert_workers),
        "--attention-step-policy", STEP_POLICY, "--expert-step-policy", STEP_POLICY,
    ]  # fmt: skip


def commands_of(fitting: FittingDivision, num_requests: int) -> list[list[str]]:
    """Return all commands: a server for each group, and a router before them if there are several groups.

    Replicas are engines of one server. Ports are counted from 8000.
    """
    arguments = serve_arguments(fitting, num_requests)
    num_servers = 1 if fitting.division.mode == "fused" else fitting.division.num_groups
    if num_servers == 1:
        return [arguments]
    ports = range(_PORT + 1, _PORT + 1 + num_servers)
    engines = [argument for port in ports for argument in ("--engine", f"http://127.0.0.1:{port}")]
    route = ["moestro", "route", *engines, "--port", str(_PORT)]
    return [*([*arguments, "--port", str(port)] for port in ports), route]


def why_simulated_only(fitting: FittingDivision) -> str:
    """Return why our server cannot run a deployment."""
    if fitting.division.mode == "fused":
        return "moestro serve has no tensor parallelism"
    if fitting.division.mode == "ep-overlap":
        return "moestro serve has no overlap of two batches"
    return "moestro serve has no ping-pong between attention and expert workers"
