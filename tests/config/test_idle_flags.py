"""Flags without effect under the other settings: one warning at the start names them and what each needs."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.running import MOESTRO, Running

from moestro.cli.app import app
from moestro.cli.main import register
from moestro.config.config_sources import settings_in
from moestro.config.idle_flags import SERVE_NEEDS, warn_of_idle_flags
from moestro.config.serve_settings import ServeSettings, with_derived
from moestro.core.setting_checks import flag_of
from moestro.gateway.settings import ROUTE_NEEDS, RouteSettings

PACED = ("qwen3-30b-a3b", "--device", "paced:h20", "--paced-arithmetic", "none")


def warnings(text: str) -> list[str]:
    return [line for line in text.splitlines() if "flags without effect" in line]


def settings_of(*flags: str) -> ServeSettings:
    register(["serve"])
    _, bound, _ = app.parse_args(["serve", *flags], print_error=False, exit_on_error=False)
    return with_derived(bound.arguments.get("settings", ServeSettings()), Path, Path)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ((), []),
        (("--port", "0", "--max-num-seqs", "8", "--engines", "2", "--no-standby", "--no-bind-cores"), []),
        (("--mode", "async", "--max-be-wait", "2", "--expert-credits", "3", "--inline-limit", "9"), []),
        (("--mode", "preemptive", "--step-policy", "fifo"), []),
        (("--seed", "42"), ["--seed (needs --load-format dummy, --gate-override or --device paced:GPU"]),
        (("--seed", "42", "--load-format", "dummy"), []),
        (("--expert-credits", "4", "--step-policy", "fifo"), ["--step-policy (needs --mode preemptive)", "--expert-"]),
        (("--gpu-memory-utilization", "0.8", "--device", "cpu"), ["--gpu-memory-utilization (needs a GPU"]),
        (("--gpu-memory-utilization", "0.8", "--device", "cuda"), []),
        ((*PACED, "--gpu-memory-utilization", "0.8"), []),
        (
            ("--gpu-memory-utilization", "0.8", "--device", "cuda", "--kv-cache-memory-bytes", "1G"),
            ["--gpu-memory-utilization (leave --kv-cache-memory-bytes out"],
        ),
        (
            ("--gpu-memory-utilization", "0.8", "--device", "cuda", "--num-gpu-blocks-override", "9"),
            ["--gpu-memory-utilization (leave --num-gpu-blocks-override out"],
        ),
        ((*PACED, "--dtype", "bfloat16", "--threads", "2"), ["--dtype, --threads (leave --paced-arithmetic none out"]),
        (("--route-policy", "lmetric", "--placement-interval", "9"), ["--route-policy (needs several engines)"]),
        (
            (*PACED, "--paced-link", "nvswitch-h100"),
            ["--paced-link (needs --device paced:GPU with --mode ep or async)"],
        ),
        (
            (*PACED, "--mode", "ep", "--engines", "2", "--num-redundant-experts", "2"),
            ["--num-redundant-experts (needs --mode async, or --mode ep with a device that is not paced)"],
        ),
    ],
)
def test_flags_without_effect_give_one_warning(flags, named, caplog):
    warn_of_idle_flags(settings_of(*flags), SERVE_NEEDS)
    assert len(caplog.records) == bool(named)
    assert all(each in caplog.text for each in named), caplog.text


def test_a_server_names_flags_without_effect_at_its_start(tmp_path):
    flags = ("--expert-credits", "4", "--step-policy", "fifo", "--num-redundant-experts", "0")
    running = Running((MOESTRO, "serve", *PACED, *flags), tmp_path)
    running.kill()
    (found,) = warnings(running.text)
    assert "--step-policy (needs --mode preemptive); --expert-credits (needs --mode async)" in found


def test_a_router_names_flags_without_effect_at_its_start(tmp_path):
    flags = ("--record-key-file", "key", "--kv-tiers", "GPU", "--max-retries", "0", "--retry-share", "0.5")
    running = Running((MOESTRO, "route", "--engine", "http://127.0.0.1:9", "--admin-port", "0", *flags), tmp_path)
    running.kill()
    (found,) = warnings(running.text)
    for each in ("--kv-tiers (needs --kv-events)", "--retry-share (leave --max-", "--record-key-file (needs --record)"):
        assert each in found


@pytest.mark.parametrize(("needs", "kind"), [(SERVE_NEEDS, ServeSettings), (ROUTE_NEEDS, RouteSettings)])
def test_the_tables_name_settings_and_flags_that_exist(needs, kind):
    own = {name for name, _ in settings_in(kind())}
    for need in needs:
        assert set(need.names) <= own
        words = {word.strip(",;.()") for word in need.text.split() if word.startswith("--")}
        assert words <= {flag_of(name) for name in own}
        assert not need.is_met(kind()) or "leave" in need.text, need.text
