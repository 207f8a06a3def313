"""The command line. Each verb imports its room when it runs, so that `moestro --help` is quick."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from cyclopts.config import Env

from moestro import __version__
from moestro.config import (
    PACED_NETWORK,
    ModelSettings,
    PacedSettings,
    SchedulerLimits,
    ServerSettings,
    ServeSettings,
    SteppingSettings,
    kv_events_from,
)
from moestro.errors import ConfigError, MoestroError
from moestro.serve.bench.settings import (
    ArrivalSettings,
    BenchSettings,
    EndpointSettings,
    GoalSettings,
    RequestSettings,
    ResultSettings,
)
from moestro.serve.calibrate.settings import MODEL_GROUP, MeasuredModel, Measuring, Range
from moestro.serve.config_sources import ConfigFile, Origins, config_lines
from moestro.serve.flags import CONFIG_GROUP, NETWORK_GROUP, ServeFlags
from moestro.serve.route.settings import RouteSettings

ORIGINS = Origins()

app = App(
    name="moestro",
    help=(
        "One scheduler for Mixture-of-Experts serving, from the cluster down to the expert.\n\n"
        "Every flag can also be set by an environment variable: --max-num-seqs by MOESTRO_MAX_NUM_SEQS."
    ),
    version=__version__,
    config=(
        Env("MOESTRO_", command=False),  # a key belongs in MOESTRO_API_KEY, not in the process list
        ConfigFile(),
        ORIGINS,
    ),
    default_parameter=Parameter(show_env_var=False, negative_iterable=()),
)


@app.command
def serve(
    model: Annotated[str | None, Parameter(group=NETWORK_GROUP)] = None,
    *,
    flags: ServeFlags = ServeFlags(),
    config: Annotated[Path | None, Parameter(group=CONFIG_GROUP)] = None,
    print_config: Annotated[bool, Parameter(group=CONFIG_GROUP, negative=())] = False,
) -> None:
    """Serve a model behind OpenAI's API.

    Parameters
    ----------
    model
        A checkpoint directory, or a name on the Hugging Face hub. Unset: the small demo model that comes with Moestro.
    config
        A YAML or TOML file of settings, named as the flags are. Flags win over the environment, and both over the file.
    print_config
        Show every setting and where it came from, in a form that --config reads, and exit.
    """
    if print_config:
        print("\n".join(config_lines({"model": model} | asdict(flags), ORIGINS)))
        return
    from moestro.serve.checkpoint import DEMO_NAME, locate_model
    from moestro.serve.server import serve as run

    network, front, engines = asdict(flags.network), asdict(flags.server), asdict(flags.engines)
    memory = {name: value for name, value in asdict(flags.memory).items() if value is not None}
    arithmetic, paced, device = network.pop("paced_arithmetic"), None, flags.network.device
    front["tokenizer"] = tokenizer = network.pop("tokenizer")
    if device.startswith("paced:"):
        if "kv_offloading_size" in memory:
            raise ConfigError("--kv-offloading-size does not go with a paced device, which plays no host memory")
        paced = PacedSettings(
            device=device,
            network=model or PACED_NETWORK,
            arithmetic=arithmetic,
            tokenizer=None if tokenizer is None else str(tokenizer),
            kv_cache_memory_bytes=memory.get("kv_cache_memory_bytes"),
        )
        model, network["device"] = None, "cpu"
    elif arithmetic == "none":
        raise ConfigError("--paced-arithmetic none goes with --device paced:GPU alone: no other answers without torch")
    front["served_model_name"] = flags.server.served_model_name or (paced.network if paced else model or DEMO_NAME,)
    run(
        ServeSettings(
            model=ModelSettings(model=str(locate_model(model)), **network, **memory),
            limits=SchedulerLimits(**asdict(flags.scheduling)),
            stepping=SteppingSettings(**asdict(flags.stepping)),
            kv_events=kv_events_from(engines.pop("kv_events_config")),
            server=ServerSettings(**front, **engines),
            paced=paced,
        ),
        flags.access,
    )


@app.command
def route(
    *,
    flags: RouteSettings = RouteSettings(),
    config: Annotated[Path | None, Parameter(group=CONFIG_GROUP)] = None,
    print_config: Annotated[bool, Parameter(group=CONFIG_GROUP, negative=())] = False,
) -> None:
    """Route requests to engines that run already: vLLM, SGLang, Moestro, or any other with OpenAI's API.

    * moestro route --engine http://127.0.0.1:8001 --engine http://127.0.0.1:8002 is all that is needed.
    * moestro route --engine a=http://gpu1:8000 --engine b=http://gpu2:8000 calls them a and b.
    * moestro explain REQUEST_ID tells why a request went where it went.

    Parameters
    ----------
    config
        A YAML or TOML file of settings, named as the flags are. Flags win over the environment, and both over the file.
    print_config
        Show every setting and where it came from, in a form that --config reads, and exit.
    """
    if print_config:
        print("\n".join(config_lines(asdict(flags), ORIGINS)))
        return
    from moestro.serve.route.server import route as run

    routing = flags.routing
    if routing.tokenizer is None:
        from moestro.serve.route.reading import text_reading

        reading = text_reading(routing.text_block_bytes)
    else:  # the tokenizer's libraries take seconds to load
        from moestro.serve.route.exact import exact_reading

        reading = exact_reading(routing.tokenizer, routing.block_size)
    run(flags, reading)


@app.command
def explain(
    request_id: str,
    *,
    admin_url: str = "http://127.0.0.1:8081",
    admin_api_key: Annotated[str | None, Parameter(show_default=False)] = None,
    record: Path | None = None,
) -> None:
    """Tell which engine a request was routed to, with which scores, why, and how it came out.

    Parameters
    ----------
    request_id
        As the answer's x-request-id header has it.
    admin_url
        The admin plane of the running router.
    admin_api_key
        Its key, if it has one; better set as MOESTRO_ADMIN_API_KEY than shown in the process list.
    record
        Look in this file of moestro route --record instead.
    """
    from rich.console import Console

    from moestro.serve.route.explain import explain as tell

    tell(request_id, admin_url=admin_url, admin_api_key=admin_api_key, record=record, console=Console())


@app.command(name="replay")
def replay_decisions(record: Path) -> None:
    """Make every decision of a record again: exit status 0 if all come out as they were, 1 if not.

    The record holds all that the router knew, so they do, unless Moestro or a policy's file has changed since.

    Parameters
    ----------
    record
        A file of moestro route --record.
    """
    from rich.console import Console

    from moestro.serve.route.replaying import replay_record

    if not replay_record(record, Console(soft_wrap=True)):
        sys.exit(1)


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

    * moestro bench --request-rate 4 is open load: four requests a second, whatever comes back.
    * moestro bench --max-concurrency 8 is closed load: eight users, each waiting for an answer.
    * moestro bench --dataset-name trace --dataset-path trace.jsonl.zst replays a trace in its own time.
    * moestro bench --goodput ttft:500 tpot:50 --find-rate finds the highest rate that keeps 90 % of requests good.
    """
    from rich.console import Console

    from moestro.serve.bench.runner import bench as run

    if results.plot is not None:
        try:
            from moestro.serve.bench.drawing import save_plot
        except ImportError as error:
            raise ConfigError("--plot needs matplotlib: pip install 'moestro[plots]'") from error
    settings = BenchSettings(endpoint=endpoint, requests=requests, arrivals=arrivals, goals=goals, results=results)
    measured = run(settings, Console())
    if results.plot is not None:
        save_plot(results.plot, measured)


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
    """Rehearse on virtual time: the production router, schedulers and policies, with modelled step durations.

    * moestro sim examples/three_routers.toml runs a file; `examples/` explains what one may hold.
    * moestro sim --replay record.jsonl --policy lmetric says what would have changed for a server's requests.

    Parameters
    ----------
    scenario
        A TOML file: the workload, the engines, and the policies to compare.
    replay
        A record that `moestro serve --record` wrote.
    policy
        Routing policies under which it is replayed.
    cost
        What its steps take: GPU/NETWORK (h20/qwen3-30b-a3b), qllm/NETWORK (QLLM's engine), or a table of
        `moestro calibrate`; unset: what the record says.
    json
        Write all figures to this file.
    plot
        Draw latencies, load, prefill, hits and queues into this directory.
    """
    from moestro.sim.verb import replay_record, run_scenario, write_json

    if (scenario is None) == (replay is None):
        raise ConfigError("moestro sim takes a scenario, or --replay with a record: exactly one of them")
    if plot is not None:
        try:
            from moestro.sim.plots import save_plots
        except ImportError as error:
            raise ConfigError("--plot needs matplotlib: pip install 'moestro[plots]'") from error
    if scenario is not None:
        report, runs = run_scenario(scenario)
    else:
        assert replay is not None, "one of them is given"
        report, runs = replay_record(replay, policy, cost)
    if json is not None:
        write_json(json, report)
    if plot is not None:
        save_plots(plot, runs)


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

    from moestro.sim.repro.lmetric import QUICK, Plan
    from moestro.sim.repro.runner import reproduce_lmetric, save

    console = Console()
    plan = QUICK if quick else Plan()
    plan = replace(plan, sources=loads or plan.sources, num_requests=num_requests or plan.num_requests)
    found = reproduce_lmetric(console, plan, traces, out)
    if out is None:
        return
    console.print(f"written: {save(found, out, 'lmetric')}")
    try:
        from moestro.sim.repro.draw import save_pictures
    except ImportError:
        console.print("no pictures: pip install 'moestro[plots]'")
        return
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

    from moestro.sim.repro.qllm.experiment import QUICK, Plan, chosen
    from moestro.sim.repro.qllm.runner import reproduce_qllm
    from moestro.sim.repro.reporting import write_result

    console = Console()
    found = reproduce_qllm(console, chosen(QUICK if quick else Plan(), loads), trace)
    if out is None:
        return
    write_result(found, out / "qllm.json")
    console.print(f"written: {out / 'qllm.json'}")
    try:
        from moestro.sim.repro.qllm.draw import save_pictures
    except ImportError:
        console.print("no pictures: pip install 'moestro[plots]'")
        return
    for path in save_pictures(found.findings, out):
        console.print(f"written: {path}")


@app.command
def calibrate(
    model: Annotated[str | None, Parameter(group=MODEL_GROUP)] = None,
    *,
    network: MeasuredModel = MeasuredModel(),
    reach: Range = Range(),
    measuring: Measuring = Measuring(),
) -> None:
    """Measure what steps of a model cost on this machine, and write a table that the simulator prices by.

    The network is loaded as a server loads it, in this process. Prefill chunks of many sizes, behind prefixes of many
    lengths, and decodes of many numbers of sequences and contexts are timed, every one several times; then batches of
    other shapes, which the table has to price. Let nothing else run meanwhile, and give it as many threads as the
    server will have.

    * moestro calibrate --out demo.json measures the demo model; it takes a minute or two on one core.
    * OMP_NUM_THREADS=1 moestro calibrate DIR --max-num-seqs 16 --max-num-batched-tokens 512 measures a smaller range.
    * moestro calibrate DIR --device cuda --max-num-seqs 256 --kv-cache-memory-bytes 20000000000 measures a GPU.

    Parameters
    ----------
    model
        A checkpoint directory, or a name on the Hugging Face hub. Unset: the small demo model that comes with Moestro.
    """
    from rich.console import Console

    from moestro.serve.calibrate.runner import CalibrateSettings
    from moestro.serve.calibrate.runner import calibrate as run
    from moestro.serve.checkpoint import DEMO_NAME, locate_model

    settings = CalibrateSettings(
        checkpoint=str(locate_model(model)),
        name=model or DEMO_NAME,
        model=network,
        range=reach,
        measuring=measuring,
    )
    run(settings, Console())


def main(arguments: Sequence[str] | None = None) -> None:
    """The `moestro` command: exit status 2 for what the operator can put right, 1 for what failed."""
    try:
        app(arguments)
    except MoestroError as error:
        print(f"moestro: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except BrokenPipeError:  # whoever read our output, `head` say, has enough; Python would complain again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
