"""What a simulation is told: frozen settings from a TOML file, in which an unknown key is an error.

Beside each key stands what it means; `examples/` has whole files to read.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Literal

import msgspec

from moestro.config.serve_settings import Mode
from moestro.core.setting_checks import check_floats
from moestro.errors import ConfigError
from moestro.flow.registry import make_step_policy
from moestro.sim.signals import AT_ONCE, SignalSettings
from moestro.workload.length_shapes import Shape

Pattern = Literal["trace", "poisson", "gamma", "weibull", "constant"]


def _check_floats(table: str, settings: object, *may_be_infinite: str) -> None:
    check_floats(settings, lambda name: f"{table} {name}", may_be_infinite)


def _at_least_1(table: str, settings: object, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ConfigError(f"[{table}] {name} must be at least 1, got {value}")


class WorkloadSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What comes in: a trace, generated sessions, or requests of one size. Exactly one of the three.

    Attributes:
        trace: a file that `workload.traces` reads; a relative path is looked for beside the configuration.
        sessions: a shape of `workload.session_shapes`; turns come when the answer before them has ended.
        prompt_tokens, output_tokens: of requests that are all alike.
        num_requests: how many; of a trace: at most the first so many.
        arrivals: trace: at the trace's own times; else at random times, or regular ones, `rate` requests a second.
        rate: requests a second. Of a trace at its own times: these are stretched to it.
        burstiness: of gamma and Weibull arrivals, their shape parameter; below 1 in bursts.
        shape: the mix of lengths is drawn anew in one of Gimbal's five shapes.
        ls_share: of requests that are latency-sensitive, drawn at random; unset: as the workload says.
        max_tokens: what clients ask for; unset: the longest answer of all.
    """

    trace: str | None = None
    sessions: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    num_requests: int | None = None
    arrivals: Pattern | None = None
    rate: float | None = None
    burstiness: float = 1.0
    shape: Shape | None = None
    ls_share: float | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        _check_floats("[workload]", self)
        given = [self.trace is not None, self.sessions is not None, self.prompt_tokens is not None]
        if sum(given) != 1:
            raise ConfigError("[workload] needs exactly one of trace, sessions, and prompt_tokens with output_tokens")
        if (self.prompt_tokens is None) != (self.output_tokens is None):
            raise ConfigError("[workload] prompt_tokens and output_tokens go together")
        if self.shape is not None and self.trace is None:
            raise ConfigError("[workload] shape draws the lengths of a trace anew: give a trace, or drop it")
        _at_least_1("workload", self, "prompt_tokens", "output_tokens", "max_tokens", "num_requests")
        if self.trace is None and (self.num_requests is None or self.rate is None):
            raise ConfigError("[workload] num_requests and rate say how many requests come, and how fast")
        self._check_arrivals()

    def _check_arrivals(self) -> None:
        if self.sessions is not None and self.arrivals is not None:
            raise ConfigError("[workload] sessions arrive at random, and their turns after the answers: drop arrivals")
        if self.arrivals not in {None, "trace"} and self.rate is None:
            raise ConfigError(f"[workload] arrivals = {self.arrivals!r} needs a rate, in requests a second")
        if self.arrivals == "trace" and self.trace is None:
            raise ConfigError("[workload] arrivals = 'trace' needs a trace")
        for name in ("rate", "burstiness"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ConfigError(f"[workload] {name} must be above 0, got {value:g}")


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engines, all alike, and what one step of them costs.

    Attributes:
        count: groups of `ep_ranks` ranks each; the router sees every rank as an engine.
        ep_ranks: that share the experts and keep step.
        gpu, network: whose steps are priced, by the names that `cost` knows.
        engine: `qllm`: priced as QLLM's engine with that network in 4 bits, whatever the GPU; num_blocks is then to be
            given. Unset: a roofline.
        table: a file that `moestro calibrate` wrote, in place of these; num_blocks is then to be given.
        host_step_us, host_sequence_us: what the engine's own code adds to a step, and for each sequence in it; unset:
            vLLM's, as `cost` has it.
        gpu_memory_utilization: what of the GPU's memory the engine takes.
        num_blocks: KV blocks of a rank; unset: what fits beside the weights.
        kv_offloading_size: GiB of host memory, for each rank, that keep the KV of preempted requests.
        block_size, max_model_len, max_num_seqs, max_num_batched_tokens, max_num_queued_reqs, enable_prefix_caching:
            as `moestro serve` has them; max_model_len unset: what the cache holds.
    """

    count: int = 1
    ep_ranks: int = 1
    gpu: str = "h20"
    network: str = "qwen3-30b-a3b"
    engine: Literal["qllm"] | None = None
    table: str | None = None
    host_step_us: float | None = None
    host_sequence_us: float | None = None
    gpu_memory_utilization: float = 0.9
    num_blocks: int | None = None
    kv_offloading_size: float = 0.0
    block_size: int = 16
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_num_queued_reqs: int = 1_000_000
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        _check_floats("[engines]", self)
        _at_least_1("engines", self, "count", "ep_ranks", "block_size", "num_blocks", "max_model_len")
        for name in ("host_step_us", "host_sequence_us"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise ConfigError(f"[engines] {name} must be 0 or more, got {value:g}")
        if self.kv_offloading_size < 0:
            raise ConfigError(f"[engines] kv_offloading_size must be 0 or more, got {self.kv_offloading_size:g}")
        if self.table is not None and self.kv_offloading_size:
            raise ConfigError("[engines] a table does not say what copies to host memory take: drop kv_offloading_size")
        if self.table is not None and self.engine is not None:
            raise ConfigError("[engines] a table prices whole steps: give it, or engine")
        if (self.table or self.engine) and (self.num_blocks is None or self.ep_ranks > 1):
            what = "a table" if self.table else f"engine {self.engine!r}"
            raise ConfigError(f"[engines] {what} prices ranks on their own, and needs num_blocks beside it")


class PolicySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One combination of policies to run the workload under.

    Attributes:
        name: in tables; unset: the routing policy's.
        route: which engine gets a request.
        scheduling_policy, batch_policy, evict_policy: of each engine. All of them as `moestro serve` takes them, with
            settings after a colon: `sjf:theta_age_s=5`.
        mode: `fused`: a step is one forward pass. `preemptive`: latency-sensitive requests pass best-effort ones inside
            it, on ranks on their own; every stage is an event then, so this takes longer, and the time of prefill is
            not told.
        max_num_urgent_seqs: places of each engine beside its max_num_seqs, which latency-sensitive requests alone may
            take; unset: none in `fused` mode and as many again in `preemptive` mode, as in `moestro serve`.
        step_policy, max_be_wait_s, pass_decodes: of `preemptive` mode, as `moestro serve` has them.
        signals: what the router hears, and how late; unset: the file's [signals].
    """

    name: str = ""
    route: str = "moestro"
    scheduling_policy: str = "fcfs"
    batch_policy: str = "decode_first"
    evict_policy: str = "last_in_order"
    mode: Mode = "fused"
    max_num_urgent_seqs: int | None = None
    step_policy: str = "qllm"
    max_be_wait_s: float = 1.0
    pass_decodes: bool = False
    signals: SignalSettings | None = None

    def __post_init__(self) -> None:
        _check_floats("[[policies]]", self, "max_be_wait_s")
        make_step_policy(self.step_policy, self.max_be_wait_s)
        if self.max_num_urgent_seqs is not None and self.max_num_urgent_seqs < 0:
            raise ConfigError(f"[[policies]] max_num_urgent_seqs must be 0 or more, got {self.max_num_urgent_seqs}")

    def check_prices(self, engines: EngineSettings) -> None:
        """Raise ConfigError if what `engines` say of the cost of a step does not do for the mode."""
        if self.mode == "preemptive" and (engines.table is not None or engines.ep_ranks > 1):
            raise ConfigError(
                "[[policies]] mode = 'preemptive' wants prices of stages, of ranks on their own: no table, ep_ranks 1"
            )

    def num_urgent_seqs(self, max_num_seqs: int) -> int:
        """`max_num_urgent_seqs`, or what it is where it is unset."""
        if self.max_num_urgent_seqs is not None:
            return self.max_num_urgent_seqs
        return max_num_seqs if self.mode == "preemptive" else 0

    @property
    def title(self) -> str:
        """What tables call it."""
        return self.name or self.route


class SloSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Upper bounds that a good request meets, milliseconds; unset: no bound."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def __post_init__(self) -> None:
        _check_floats("[slos]", self)


class SimSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of a simulation.

    Attributes:
        seed: of everything drawn.
        workload, engines, signals: see there.
        policies: one run each; the first is what the others are compared with.
        slos: what a request must meet to count as good.
    """

    workload: WorkloadSettings
    engines: EngineSettings = EngineSettings()
    signals: SignalSettings = AT_ONCE
    policies: tuple[PolicySettings, ...] = (PolicySettings(),)
    slos: SloSettings | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"seed must not be negative, got {self.seed}")
        for policy in self.policies:
            policy.check_prices(self.engines)
        titles = [policy.title for policy in self.policies]
        if not titles or len(set(titles)) < len(titles):
            raise ConfigError(
                f"[[policies]] need at least one, and names of their own; got {', '.join(titles) or 'none'}"
            )


def read_settings(path: Path) -> SimSettings:
    """The simulation that a TOML file describes.

    Raises:
        ConfigError: it cannot be read, a key or value is not allowed; the text names the file and the key.
    """
    try:
        text = path.read_text(encoding="utf-8")
        return msgspec.convert(tomllib.loads(text), SimSettings)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {_in_words(str(error))}") from error


def _in_words(text: str) -> str:
    """msgspec's message with TOML's way of naming a place."""
    what, _, where = text.partition(" - at `$")
    place = where.removesuffix("`").removeprefix(".").replace("[...]", "")
    return f"{what} in [{place}]" if place else what
