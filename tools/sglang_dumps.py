"""Make the dumps of tests/workload/sglang_dumps/ with SGLang's own recorder, on a CPU and without its engine.

    pip download sglang==0.5.23 --no-deps && unzip sglang-*.whl 'sglang/srt/eplb/*' -d PEER   # and einops
    python tools/sglang_dumps.py record PEER OUT_FOLDER
    python tools/sglang_dumps.py accept PEER PLACEMENT.json NUM_DEVICES NUM_LAYERS NUM_EXPERTS

`record` runs two processes of SGLang's `ExpertDistributionRecorder` in each of its four modes. `accept` gives a file to
SGLang's `compute_initial_expert_location_metadata`, the parser of `--init-expert-location`. What these two modules ask
of the engine (its settings, its device, its model's class) is stood in for; all of their code runs as it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed
import torch.multiprocessing

NUM_RANKS, NUM_LAYERS, NUM_EXPERTS, NUM_SLOTS, TOP_K = 2, 4, 12, 16, 2  # the first layer is dense
STEPS, TOKENS = 6, 20
MODES = ("stat", "stat_approx", "per_pass", "per_token")


class _Value:
    """SGLang's `Withable`: a value while a block runs."""

    value: Any = None

    def with_value(self, value: Any) -> Any:
        @contextlib.contextmanager
        def held() -> Any:
            before, self.value = self.value, value
            yield
            self.value = before

        return held()


def stand_in(peer: Path, mode: str, a2a: str, num_devices: int = NUM_RANKS, init: str = "trivial") -> None:
    """Make SGLang's two modules importable from `peer`, with one process's settings."""
    moe = SimpleNamespace(
        expert_distribution_recorder_mode=mode, moe_a2a_backend=a2a, deepep_mode="normal", elastic_ep_backend=None,
        expert_distribution_recorder_buffer_size=STEPS + 2, eplb_min_rebalancing_utilization_threshold=1.0,
        expert_balancedness_report_mode=None, ep_num_redundant_experts=NUM_SLOTS - NUM_EXPERTS,
        ep_dispatch_algorithm=None, init_expert_location=init, ep_join_mode=None,
    )  # fmt: skip
    context = {
        "get_device": lambda: SimpleNamespace(device="cpu"),
        "get_exec": lambda: SimpleNamespace(moe=moe, overlap=SimpleNamespace(enable_two_batch_overlap=False)),
        "get_platform": lambda: SimpleNamespace(is_hip=False),
        "get_schedule": lambda: SimpleNamespace(chunked_prefill_size=8),
        "get_parallel": lambda: SimpleNamespace(ep_size=num_devices, nnodes=1, elastic_ep_initial_size=None),
        "get_resources": lambda: SimpleNamespace(expert_distribution_recorder=None),
        "logs_expert_balancedness_to_server_log": lambda: False,
        "reports_expert_balancedness": lambda: False,
    }
    folder = SimpleNamespace(get=lambda: os.environ["SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR"])
    modules: dict[str, dict[str, Any]] = {
        "environ": {"envs": SimpleNamespace(SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR=folder)},
        "model_executor.forward_batch_info": {"ForwardBatch": object, "ForwardMode": SimpleNamespace()},
        "observability.metrics_collector": dict.fromkeys(
            ("STAT_LOGGER_ROLE_EXPERT_DISPATCH", "ExpertDispatchCollector", "resolve_collector_class")
        ),
        "runtime_context": context,
        "utils": {"Withable": _Value, "get_device": lambda: "cpu", "get_int_env_var": lambda _name, other: other},
        "elastic_ep.elastic_ep": {"elastic_expanded_world_enabled": lambda: False},
        "layers.moe": {"get_moe_a2a_backend": lambda: SimpleNamespace(is_megamoe=lambda: False)},
        "model_loader": {"get_model_architecture": lambda config: (config.model_class, None)},
    }
    sys.path.insert(0, str(peer))
    packages = ["", ".srt", *(f".srt.{name.partition('.')[0]}" for name in modules if "." in name)]
    for package in packages:
        module = sys.modules.setdefault(f"sglang{package}", types.ModuleType(f"sglang{package}"))
        module.__path__ = [str(peer / "sglang" / package.strip(".").replace(".", "/"))]
    for name, contents in modules.items():
        module = types.ModuleType(f"sglang.srt.{name}")
        module.__dict__.update(contents)
        sys.modules[f"sglang.srt.{name}"] = module
    if not hasattr(torch.cpu, "empty_cache"):
        torch.cpu.empty_cache = lambda: None  # type: ignore[attr-defined]


def choices(rank: int, step: int) -> torch.Tensor:
    """int[layers, tokens, top_k], logical experts of a rank's tokens; skewed, and another mix on each rank."""
    rng = np.random.default_rng([rank, step])
    popularity = 1.0 / (1 + np.arange(NUM_EXPERTS)) ** 0.8
    found = np.full((NUM_LAYERS, TOKENS, TOP_K), -1)
    for layer in range(1, NUM_LAYERS):
        chances = np.roll(np.random.default_rng(layer).permutation(popularity), 3 * rank)
        for token in range(TOKENS):
            found[layer, token] = rng.choice(NUM_EXPERTS, TOP_K, replace=False, p=chances / chances.sum())
    return torch.from_numpy(found)


def record(rank: int, peer: Path, out: Path, mode: str) -> None:
    """Record and dump as one of SGLang's ranks."""
    os.environ["SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR"] = str(out / f".{mode}")
    stand_in(peer, mode, "deepep" if mode == "stat_approx" else "none")
    from sglang.srt.eplb.expert_distribution import ExpertDistributionRecorder  # noqa: PLC0415 exists from here on

    torch.distributed.init_process_group("gloo", init_method=f"file://{out}/.meet_{mode}", rank=rank, world_size=2)
    slots = torch.arange(NUM_SLOTS).repeat(NUM_LAYERS, 1) % NUM_EXPERTS
    places = SimpleNamespace(
        num_layers=NUM_LAYERS, num_physical_experts=NUM_SLOTS, num_local_physical_experts=NUM_SLOTS // NUM_RANKS,
        num_logical_experts=NUM_EXPERTS, physical_to_logical_map=slots, ep_size=NUM_RANKS,
    )  # fmt: skip
    recorder = ExpertDistributionRecorder.init_new(places, rank)
    recorder.start_record()
    for step in range(STEPS):
        mine, everyone = choices(rank, step), [choices(r, step) for r in range(NUM_RANKS)]
        batch = SimpleNamespace(
            input_ids=torch.arange(TOKENS), positions=torch.arange(TOKENS), extend_seq_lens_cpu=None,
            forward_mode=SimpleNamespace(value=2),
        )  # fmt: skip
        with recorder.with_forward_pass(step, batch):
            for layer in range(1, NUM_LAYERS):
                with recorder.with_current_layer(layer):
                    if mode == "stat_approx":  # DeepEP reports what this rank's slots receive
                        physical = torch.cat([each[layer].flatten() for each in everyone])
                        local = torch.bincount(physical, minlength=NUM_SLOTS)[rank * 8 : rank * 8 + 8].tolist()
                        recorder.on_deepep_dispatch_normal(local, None, None, None)
                    else:
                        odd = torch.arange(TOKENS)[:, None] % 2 == 1  # odd tokens use the second copy
                        spare = (mine[layer] < NUM_SLOTS - NUM_EXPERTS) & odd
                        recorder.on_select_experts(torch.where(spare, mine[layer] + NUM_EXPERTS, mine[layer]))
    recorder.stop_record()
    recorder.dump_record()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def record_all(peer: Path, out: Path) -> None:
    """Write the dumps of all modes."""
    for mode in MODES:
        torch.multiprocessing.spawn(record, (peer, out, mode), nprocs=NUM_RANKS)
        for found in sorted((out / f".{mode}").iterdir()):
            rank = found.stem.rpartition("_")[2]
            found.rename(out / (f"{mode}_{rank}.pt" if mode.startswith("per") else f"{mode}.pt"))
        (out / f".{mode}").rmdir()
        (out / f".meet_{mode}").unlink(missing_ok=True)


def accept(peer: Path, file: Path, num_devices: int, num_layers: int, num_experts: int) -> None:
    """Give a placement to SGLang's parser as each rank of a group would."""
    stand_in(peer, "stat", "deepep", num_devices, init=str(file))
    from sglang.srt.eplb import expert_location  # noqa: PLC0415 exists from here on
    from sglang.srt.runtime_context import get_exec  # noqa: PLC0415

    class Model:
        @staticmethod
        def get_model_config_for_expert_location(_config: Any) -> Any:
            return expert_location.ModelConfigForExpertLocation(num_layers, num_experts)

    slots = len(json.loads(file.read_text())["physical_to_logical_map"][0])
    get_exec().moe.ep_num_redundant_experts = slots - num_experts
    for rank in range(num_devices):
        found = expert_location.compute_initial_expert_location_metadata(
            SimpleNamespace(model_class=Model, hf_config=None), rank
        )
        assert found is not None
        assert (found.num_layers, found.num_physical_experts) == (num_layers, slots)
        assert (found.logical_to_all_physical_map_num_valid > 0).all(), "an expert has no copy"
    print(f"SGLang accepts {file}: {num_layers} layers, {slots} slots on {num_devices} devices")


if __name__ == "__main__":
    verb, peer_folder, *rest = sys.argv[1:]
    if verb == "record":
        record_all(Path(peer_folder).resolve(), Path(rest[0]).resolve())
    else:
        accept(Path(peer_folder).resolve(), Path(rest[0]), *map(int, rest[1:]))
