"""`moestro sim`: the simulator."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from moestro.cli.app import app, loading, require_extra
from moestro.config.user_files import check_files, check_folder
from moestro.core.setting_checks import CheckedSettings, above, at_least
from moestro.errors import ConfigError

_RUNS = Parameter(group=Group.create_ordered("Runs", help="What replaces the file's settings, and on how many cores."))
_REPLAY = Parameter(
    group=Group.create_ordered("Replay", help="Recorded traffic in place of a file: what would another policy do?")
)
_OUTPUT = Parameter(group=Group.create_ordered("Output", help="Files beside the table on standard output."))


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SimRunOptions(CheckedSettings):
    """Choices of runs."""

    load: Annotated[float | None, above(0), _RUNS] = None
    (
        "Offer this share of saturation, 0.8 for 80 %, which a run of the first policy finds with all requests at once."
        " The rate is printed. Replaces rate and load of [workload]."
    )
    seeds: Annotated[int | None, at_least(1), _RUNS] = None
    "Run each policy with so many seeds; the table has means and 95 % intervals. Replaces num_seeds."
    kv_offloading_size: Annotated[float | None, at_least(0), _RUNS] = None
    "GiB of host memory of each engine below its prefix cache, as for `serve`. Replaces that of [engines]."
    jobs: Annotated[int | None, at_least(1), _RUNS] = None
    "Processes for independent runs. Unset: one a core, where the runs are long enough."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SimReplayOptions(CheckedSettings):
    """Choices of a replay."""

    replay: Annotated[tuple[Path, ...], Parameter(consume_multiple=True), _REPLAY] = ()
    "Records of --record, joined on the wall clock: of one or more `moestro serve`, or of one or more `moestro route`."
    policy: Annotated[tuple[str, ...], Parameter(consume_multiple=True), _REPLAY] = ()
    "Routing policies under which the record is replayed."
    cost: Annotated[str | None, _REPLAY] = None
    (
        "Cost of the engines' steps: GPU/NETWORK (h20/qwen3-30b-a3b), qllm/NETWORK (QLLM's engine), or a table of"
        " `moestro calibrate`; unset: the cost of the record's device."
    )
    engines: Annotated[Path | None, _REPLAY] = None
    "A TOML file whose table [engines] replaces what the record says of the engines. A router's record says little."
    closed_loop: Annotated[bool, Parameter(negative=()), _REPLAY] = False
    (
        "A turn of a session comes as long after the simulated end of the turn before it as after the recorded one."
        " Unset: arrivals stay as recorded."
    )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SimOutputOptions(CheckedSettings):
    """Files that a simulation writes."""

    json: Annotated[Path | None, _OUTPUT] = None
    "Write all figures to this file."
    requests: Annotated[Path | None, _OUTPUT] = None
    "Write a row for each request of each run to this file, .csv or .jsonl; docs/simulator.md has the columns."
    plot: Annotated[Path | None, _OUTPUT] = None
    "Draw latencies, load, prefill, hits and queues into this directory; of several seeds, the first."


@app.command
def sim(
    scenario: Path | None = None,
    *,
    runs: SimRunOptions = SimRunOptions(),
    recorded: SimReplayOptions = SimReplayOptions(),
    output: SimOutputOptions = SimOutputOptions(),
) -> None:
    """Simulate on virtual time: the production router, schedulers and policies, with modelled step durations.

    * moestro sim examples/three_routers.toml runs a file; the files in `examples/` explain their settings.
    * moestro sim examples/three_routers.toml --load 0.8 --seeds 5 offers 80 % of saturation, with intervals.
    * moestro sim --replay record.jsonl --policy lmetric shows what changes for a server's recorded requests.

    Parameters
    ----------
    scenario
        A TOML file: the workload, the engines or groups of workers, and the policies and modes to compare.
    """
    with loading("the simulator"):
        from moestro.sim import verb
        from moestro.sim.replay import WhatIfSettings, read_engines

    if (scenario is None) == (not recorded.replay):
        raise ConfigError("moestro sim takes a scenario, or --replay with a record: exactly one of them")
    _check_options(runs, recorded)
    check_files({"--json": output.json, "--requests": output.requests})
    if output.requests is not None:
        verb.check_table_name(output.requests)
    if output.plot is not None:
        check_folder("--plot", output.plot)
        require_extra("plots", "--plot")
        from moestro.sim.plots import save_plots
    if scenario is not None:
        choices = verb.RunChoices(
            load=runs.load,
            num_seeds=runs.seeds,
            kv_offloading_size=runs.kv_offloading_size,
            num_processes=runs.jobs,
        )
        answer = verb.run_scenario(scenario, choices)
    else:
        question = WhatIfSettings(
            policies=recorded.policy,
            cost=recorded.cost,
            engines={} if recorded.engines is None else read_engines(recorded.engines),
            is_closed_loop=recorded.closed_loop,
        )
        answer = verb.replay_records(recorded.replay, question)
    if output.json is not None:
        verb.write_json(output.json, answer.report)
    if output.requests is not None:
        verb.write_request_table(output.requests, answer.runs)
    if output.plot is not None:
        save_plots(output.plot, answer.first_runs())


def _check_options(runs: SimRunOptions, recorded: SimReplayOptions) -> None:
    """Refuse options that would have no effect."""
    if recorded.replay and runs != SimRunOptions():
        raise ConfigError(
            "--load, --seeds, --kv-offloading-size and --jobs belong to a scenario: a replay has its requests, once"
        )
    if not recorded.replay and recorded != SimReplayOptions():
        raise ConfigError("--policy, --cost, --engines and --closed-loop need --replay with a record")
