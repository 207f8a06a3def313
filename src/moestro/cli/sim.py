"""`moestro sim`: the simulator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from moestro.cli.app import app
from moestro.cli.extras import require_extra
from moestro.errors import ConfigError


@app.command
def sim(
    scenario: Path | None = None,
    *,
    replay: Path | None = None,
    policy: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = (),
    cost: str | None = None,
    json: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Simulate on virtual time: the production router, schedulers and policies, with modelled step durations.

    * moestro sim examples/three_routers.toml runs a file; the files in `examples/` explain their settings.
    * moestro sim --replay record.jsonl --policy lmetric shows what changes for a server's recorded requests.

    Parameters
    ----------
    scenario
        A TOML file: the workload, the engines or groups of workers, and the policies and modes to compare.
    replay
        A record that `moestro serve --record` wrote.
    policy
        Routing policies under which the record is replayed.
    cost
        Cost of the engines' steps: GPU/NETWORK (h20/qwen3-30b-a3b), qllm/NETWORK (QLLM's engine), or a table of
        `moestro calibrate`; unset: the cost of the record's device.
    json
        Write all figures to this file.
    plot
        Draw latencies, load, prefill, hits and queues into this directory.
    """
    from moestro.sim.verb import replay_record, run_scenario, write_json

    if (scenario is None) == (replay is None):
        raise ConfigError("moestro sim takes a scenario, or --replay with a record: exactly one of them")
    if plot is not None:
        require_extra("plots", "--plot")
        from moestro.sim.plots import save_plots
    if scenario is not None:
        report, runs = run_scenario(scenario)
    else:
        assert replay is not None, "exactly one of them is given"
        report, runs = replay_record(replay, policy, cost)
    if json is not None:
        write_json(json, report)
    if plot is not None:
        save_plots(plot, runs)
