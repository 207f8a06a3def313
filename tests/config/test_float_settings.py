"""Every float setting of every command: NaN is refused with a sentence, and so is inf where it has no meaning."""

from __future__ import annotations

import io
import math
import typing
from dataclasses import is_dataclass

import msgspec
import pytest

from moestro.cli import main
from moestro.config.launch_spec import LaunchSpec, read_launch_spec, write_launch_spec
from moestro.config.serve_settings import ServeSettings
from moestro.engine.settings import SchedulerOptions
from moestro.errors import ConfigError
from moestro.flow.settings import SteppingSettings
from moestro.gateway.settings import RouteSettings
from moestro.loadgen.settings import BenchSettings
from moestro.model.settings import ModelSettings
from moestro.sim.settings import SimSettings, read_settings

MAY_BE_INFINITE = {"--max-be-wait", "--request-rate"}
COMMANDS = {
    "serve": (ServeSettings, ()),
    "route": (RouteSettings, ("--engine", "http://127.0.0.1:1")),
    "bench": (BenchSettings, ()),
}


def float_names(kind: type) -> list[str]:
    """Names of the float fields of a settings class and of the groups in it."""
    hints = typing.get_type_hints(kind)
    names = []
    for name, hint in hints.items():
        if is_dataclass(hint):
            names += float_names(hint)
        elif hint is float or float in typing.get_args(hint):
            names.append(name)
    return names


FLAGS = [
    (command, "--" + name.replace("_", "-")) for command, (kind, _) in COMMANDS.items() for name in float_names(kind)
]


def refusal(capsys, *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return caught.value.code, capsys.readouterr().err.strip()


def test_the_flags_of_the_test_are_found():
    assert {command for command, _ in FLAGS} == set(COMMANDS)
    assert {("serve", "--engine-timeout"), ("route", "--idle-timeout"), ("bench", "--burstiness")} <= set(FLAGS)


@pytest.mark.parametrize(("command", "flag"), FLAGS)
@pytest.mark.parametrize("value", ["nan", "inf", "1e300"])
def test_a_value_that_is_no_usable_number_is_refused_with_the_flag_and_the_value(capsys, command, flag, value):
    if value == "inf" and flag in MAY_BE_INFINITE:
        pytest.skip("allowed")
    code, text = refusal(capsys, command, *COMMANDS[command][1], flag, value)
    assert code == 2
    assert text == f"moestro: {flag} must be a number up to 1e+09, got {float(value):g}"


PLACES = [
    *(("workload", name) for name in ("rate", "load", "burstiness", "ls_share")),
    *(("workload", name) for name in ("start_s", "duration_s", "think_s")),
    *(("engines", name) for name in ("host_step_us", "host_sequence_us", "gpu_memory_utilization")),
    ("engines", "kv_offloading_size"),
    *(("engines", name) for name in ("host_attention_us", "host_expert_us", "api_us", "api_token_us")),
    *(("group", name) for name in ("slowdown", "jitter")),
    *(("policies", name) for name in ("place_drift", "place_payback_steps")),
    ("popularity", "skew"),
    *(("policies", name) for name in ("max_be_wait", "stall_share", "queue_kv_usage")),
    *(("policies", name) for name in ("router_delay_ms", "router_loss")),
    *(("slos", name) for name in ("ttft_ms", "tpot_ms", "e2e_ms")),
    *(("signals", name) for name in ("response_delay_ms", "kv_events_delay_ms")),
    *(("signals.channels", name) for name in ("delay_ms", "period_ms")),
]  # fmt: skip


@pytest.mark.parametrize(("table", "name"), PLACES)
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_scenario_with_such_a_value_is_refused_with_its_place(tmp_path, table, name, value):
    if (name, value) == ("max_be_wait", "inf"):
        pytest.skip("allowed")
    file = tmp_path / "scenario.toml"
    lines = ["[workload]\nprompt_tokens = 8\noutput_tokens = 8\nnum_requests = 1"]
    lines += [] if name in {"rate", "load"} else ["rate = 1.0"]
    heading = {
        "policies": "[[policies]]",
        "group": "[group]\nnum_workers = 2",
        "signals.channels": "[[signals.channels]]\nfigures = ['num_running']",
    }
    lines += [] if table == "workload" else [heading.get(table, f"[{table}]")]
    file.write_text("\n".join([*lines, f"{name} = [{value}]" if name == "slowdown" else f"{name} = {value}"]))
    with pytest.raises(ConfigError, match=rf"{name} must be a number up to 1e\+09, got {value}"):
        read_settings(file)


def test_every_float_of_a_scenario_is_in_the_list_above():
    def names(kind: object) -> set[str]:
        if not (isinstance(kind, type) and (issubclass(kind, msgspec.Struct) or is_dataclass(kind))):
            return set().union(*map(names, typing.get_args(kind)))
        hints = typing.get_type_hints(kind)
        own = {name for name, hint in hints.items() if hint is float or float in typing.get_args(hint)}
        return own.union(*map(names, hints.values()))

    assert names(SimSettings) == {name for _, name in PLACES}


@pytest.mark.parametrize("max_be_wait", [0.0, 0.1, 1e9, math.inf])
def test_a_launch_spec_arrives_as_it_was_sent(max_be_wait):
    spec = LaunchSpec(
        rank=3,
        launch=1,
        address="ipc:///tmp/moestro-\n/ranks",
        launched_ns=2**62,
        log_level="info",
        model=ModelSettings(model="m", tokenizer="/t", kv_offloading_size=0.1),
        scheduler=SchedulerOptions(),
        stepping=SteppingSettings(mode="preemptive", max_be_wait=max_be_wait),
    )
    stream = io.BytesIO(write_launch_spec(spec) + b"what follows")
    assert read_launch_spec(stream) == spec
    assert stream.read() == b"what follows"


def test_a_launch_spec_that_is_cut_off_is_an_error():
    with pytest.raises(EOFError, match="ended before its launch spec"):
        read_launch_spec(io.BytesIO(b"\0\0\0\x10half"))
