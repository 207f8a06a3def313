"""The settings of `moestro bench`. A docstring under a field is its text in `--help`.

Names are those of `vllm bench serve` where the meaning is the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from moestro.config.user_files import check_files
from moestro.core.setting_checks import CheckedSettings, above, at_least
from moestro.errors import ConfigError
from moestro.workload.generated.draws import Shape

EndpointType = Literal["completions", "chat"]
DatasetName = Literal["random", "trace", "sharegpt", "servegen", "chat", "api_agent", "coder", "tool_agent"]
_OF_FILES = ("trace", "sharegpt", "servegen")
ArrivalKind = Literal["auto", "poisson", "gamma", "weibull", "constant", "trace"]

_ENDPOINT = Group.create_ordered("Endpoint", help="Which server is measured.")
_REQUESTS = Group.create_ordered("Requests", help="The requests.")
_ARRIVALS = Group.create_ordered(
    "Arrivals",
    help=(
        "When requests are sent. With --request-rate the load is open: requests come at that rate whatever the server"
        " does. With --max-concurrency alone the load is closed: a request is sent when an earlier one has ended."
    ),
)
_GOALS = Group.create_ordered("Goals", help="When a request counts as good, and which load stays good.")
_RESULTS = Group.create_ordered("Results", help="Files for the figures, besides the table.")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class EndpointSettings(CheckedSettings):
    """The server that is measured."""

    base_url: Annotated[str, Parameter(name=("--base-url", "--url"), group=_ENDPOINT)] = "http://127.0.0.1:8000"
    "Address of the server, with or without /v1."
    model: Annotated[str | None, Parameter(group=_ENDPOINT)] = None
    "Name of the model on the server; unset: the first that /v1/models lists."
    endpoint_type: Annotated[EndpointType, Parameter(group=_ENDPOINT)] = "completions"
    "completions: an exact number of token ids; chat: words of about one token each."
    api_key: Annotated[str | None, Parameter(group=_ENDPOINT, show_default=False)] = field(default=None, repr=False)
    "Bearer token of all requests. MOESTRO_API_KEY keeps it out of the process list."
    timeout: Annotated[float, above(0), Parameter(group=_ENDPOINT)] = 600.0
    "Seconds after which a request without a complete answer counts as failed."

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"--base-url must begin with http:// or https://, got {self.base_url}")

    @property
    def root(self) -> str:
        """`base_url` without a slash or /v1 at its end."""
        return self.base_url.rstrip("/").removesuffix("/v1").rstrip("/")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RequestSettings(CheckedSettings):
    """The requests of a run."""

    dataset_name: Annotated[DatasetName, Parameter(group=_REQUESTS)] = "random"
    (
        "random: prompts of equal length, of random tokens. trace: as --dataset-path recorded them. sharegpt: the first"
        " questions of the conversations in --dataset-path. servegen: from the clients in --dataset-path. chat,"
        " api_agent, coder, tool_agent: generated sessions (docs/workloads.md)."
    )
    dataset_path: Annotated[Path | None, Parameter(group=_REQUESTS)] = None
    "A trace (.jsonl, .csv, ShareGPT's .json; also .zst), its form recognised by its fields, or ServeGen's clients."
    num_prompts: Annotated[int | None, at_least(1), Parameter(group=_REQUESTS)] = None
    "Number of requests; unset: 200, or the whole trace of --dataset-name trace."
    length_shape: Annotated[Shape | None, Parameter(group=_REQUESTS)] = None
    "Draw --num-prompts of the trace's lengths so that their prompts have one of Gimbal's five shapes."
    random_input_len: Annotated[int, at_least(1), Parameter(group=_REQUESTS)] = 256
    "Tokens of a random prompt, beyond the prefix."
    random_output_len: Annotated[int, at_least(1), Parameter(group=_REQUESTS)] = 64
    "Tokens of the answer to a random prompt, and to a trace's request without a length."
    random_prefix_len: Annotated[int, at_least(0), Parameter(group=_REQUESTS)] = 0
    "Tokens of the common prefix of all random prompts, for the prefix cache."
    vocab_size: Annotated[int, at_least(1), Parameter(group=_REQUESTS)] = 4096
    "Token ids are drawn from 0 to this number, exclusive. Set it to the model's, so that the gate sees all tokens."
    ignore_eos: Annotated[bool, Parameter(group=_REQUESTS)] = True
    "Request answers of exact length; set --no-ignore-eos for servers that refuse the field."
    temperature: Annotated[float, at_least(0), Parameter(group=_REQUESTS)] = 0
    "Temperature of all requests. Greedy answers (0) may repeat a few tokens, which visit few experts."
    skip_too_long: Annotated[bool, Parameter(group=_REQUESTS, negative=())] = False
    "Leave out a trace's requests that the model's context cannot hold. Unset: the run is refused if there are any."
    seed: Annotated[int, at_least(0), Parameter(group=_REQUESTS)] = 0
    "Random seed of prompts and arrivals. A second run with the same seed finds its prompts in the server's cache."

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.dataset_name in _OF_FILES) != (self.dataset_path is not None):
            raise ConfigError(
                f"--dataset-name {self.dataset_name} {'needs' if self.dataset_path is None else 'takes no'}"
                f" --dataset-path FILE; those of a file are {', '.join(_OF_FILES)}"
            )
        if self.length_shape is not None and self.dataset_name != "trace":
            raise ConfigError("--length-shape draws from a trace's lengths: give --dataset-name trace too")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ArrivalSettings(CheckedSettings):
    """Their times."""

    request_rate: Annotated[float | None, above(0, may_be_infinite=True), Parameter(group=_ARRIVALS)] = None
    "Requests a second; inf: no schedule, all at once. Unset: a trace's own times, otherwise inf."
    arrivals: Annotated[ArrivalKind, Parameter(group=_ARRIVALS)] = "auto"
    "Pattern of arrivals; auto: that of the trace if it has times, otherwise poisson, or gamma with --burstiness."
    burstiness: Annotated[float, above(0), Parameter(group=_ARRIVALS)] = 1.0
    "Shape of gamma or weibull arrivals: 1 is poisson, less comes in bursts, more is steadier."
    rate_factor: Annotated[float, above(0), Parameter(group=_ARRIVALS)] = 1.0
    "Replay a trace this many times as fast as it was recorded."
    max_concurrency: Annotated[int | None, at_least(1), Parameter(group=_ARRIVALS)] = None
    "Maximum requests at the server at once; further ones wait in the client. With a rate, the wait counts as latency."
    num_warmups: Annotated[int, at_least(0), Parameter(group=_ARRIVALS)] = 4
    "Requests before the run that are not counted. If all of them fail, the run is cancelled."

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rate_factor != 1 and self.request_rate is not None:
            raise ConfigError("--rate-factor and --request-rate both set a trace's speed: give one of them")
        if self.burstiness != 1 and self.arrivals not in {"auto", "gamma", "weibull"}:
            raise ConfigError(
                f"--burstiness shapes gamma and weibull arrivals, not --arrivals {self.arrivals}: drop one of them"
            )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class GoalSettings(CheckedSettings):
    """Objectives."""

    goodput: Annotated[tuple[str, ...], Parameter(group=_GOALS, consume_multiple=True)] = ()
    "Upper bounds of a good request, in milliseconds: ttft:500 tpot:50 e2e:10000, any of them."
    find_rate: Annotated[bool, Parameter(group=_GOALS, negative=())] = False
    "Search for the highest rate at which --slo-share of the requests are good, from --request-rate or a guess."
    slo_share: Annotated[float, above(0, at_most=1), Parameter(group=_GOALS)] = 0.9
    "Share of requests that must be good, 0 to 1. A failed request is not good."
    rate_tolerance: Annotated[float, above(0), Parameter(group=_GOALS)] = 0.05
    "Stop the search when the rate is known to this fraction."
    max_probes: Annotated[int, at_least(1), Parameter(group=_GOALS)] = 12
    "Maximum number of rates to try. Each is a run of --num-prompts, which should last half a minute."

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.find_rate and not self.goodput:
            raise ConfigError("--find-rate needs to know what is good: give --goodput, for instance ttft:500 tpot:50")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ResultSettings:
    """The files of results."""

    json: Annotated[Path | None, Parameter(group=_RESULTS)] = None
    "Write figures and conditions to this file."
    save_detailed: Annotated[bool, Parameter(group=_RESULTS, negative=())] = False
    "Write the times of each request to --json, too."
    plot: Annotated[Path | None, Parameter(group=_RESULTS)] = None
    "Draw the latencies into this file (.png, .svg or .pdf); needs matplotlib: pip install 'moestro[plots]'."

    def __post_init__(self) -> None:
        check_files({"--json": self.json, "--plot": self.plot})
        if self.plot is not None and self.plot.suffix not in {".png", ".svg", ".pdf"}:
            raise ConfigError(f"--plot {self.plot} must end in .png, .svg or .pdf")
        if self.save_detailed and self.json is None:
            raise ConfigError("--save-detailed adds to --json FILE: give both")


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """All of `moestro bench`."""

    endpoint: EndpointSettings = field(default_factory=EndpointSettings)
    requests: RequestSettings = field(default_factory=RequestSettings)
    arrivals: ArrivalSettings = field(default_factory=ArrivalSettings)
    goals: GoalSettings = field(default_factory=GoalSettings)
    results: ResultSettings = field(default_factory=ResultSettings)

    def __post_init__(self) -> None:
        if self.goals.find_rate and self.arrivals.request_rate == math.inf:
            raise ConfigError(
                "--find-rate starts at --request-rate, which cannot be inf: give a guess, or leave it out"
            )
        if self.arrivals.arrivals == "trace" and self.requests.dataset_name == "random":
            raise ConfigError("--arrivals trace needs times to replay: give --dataset-name trace --dataset-path FILE")
