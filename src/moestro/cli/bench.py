"""`moestro bench`: the load generator."""

from __future__ import annotations

from moestro.cli.app import app, require_extra
from moestro.loadgen.settings import (
    ArrivalSettings,
    BenchSettings,
    EndpointSettings,
    GoalSettings,
    RequestSettings,
    ResultSettings,
)


@app.command
def bench(
    *,
    endpoint: EndpointSettings = EndpointSettings(),
    requests: RequestSettings = RequestSettings(),
    arrivals: ArrivalSettings = ArrivalSettings(),
    goals: GoalSettings = GoalSettings(),
    results: ResultSettings = ResultSettings(),
) -> None:
    """Measure any OpenAI-compatible server under load: latency, throughput, and goodput under objectives.

    * moestro bench --request-rate 4 is open load: four requests per second, whatever the server does.
    * moestro bench --max-concurrency 8 is closed load: eight users, each waiting for an answer.
    * moestro bench --dataset-name trace --dataset-path trace.jsonl.zst replays a trace at its recorded times.
    * moestro bench --goodput ttft:500 tpot:50 --find-rate finds the highest rate that keeps 90 % of requests good.
    """
    from rich.console import Console

    from moestro.loadgen.runner import bench as run

    if results.plot is not None:
        require_extra("plots", "--plot")
        from moestro.loadgen.drawing import save_plot
    settings = BenchSettings(endpoint=endpoint, requests=requests, arrivals=arrivals, goals=goals, results=results)
    measured = run(settings, Console())
    if results.plot is not None:
        save_plot(results.plot, measured)
