"""The command of a vLLM server on the CPU, which is installed in another virtual environment."""

from __future__ import annotations

import json
import os
from pathlib import Path

from shared.models import DEMO

BLOCK_SIZE = 32


def command(vllm: str, port: int, *flags: str, model: Path = DEMO) -> list[str]:
    """Return the command of a server with prefix cache that names its model `m`."""
    return [
        vllm, "serve", str(model), "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "m",
        "--max-model-len", "2048", "--enforce-eager", "--enable-prefix-caching", "--enable-prompt-tokens-details",
        "--block-size", str(BLOCK_SIZE), *flags,
    ]  # fmt: skip


def kv_events(events_port: int, replay_port: int) -> list[str]:
    """Return the flags that publish KV events; rank r of a server publishes at these ports + r."""
    config = {
        "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{events_port}",
        "replay_endpoint": f"tcp://*:{replay_port}",
    }  # fmt: skip
    return ["--kv-events-config", json.dumps(config)]


def environment(vllm: str, cores: str) -> dict[str, str]:
    """Return the environment variables of a server; `cores` names a core for each rank, as in "0|1"."""
    return {
        "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1", "PATH": f"{Path(vllm).parent}:{os.environ['PATH']}",
    }  # fmt: skip
