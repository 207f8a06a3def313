"""The flags of `moestro serve`, by groups, each with its sentence for `--help`. The docstrings are the help's text."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from moestro.config.serve_settings import (
    Dtype,
    GenerationConfig,
    LoadFormat,
    Mode,
    PacedArithmetic,
)
from moestro.core.policy_registry import PolicyKind, PolicyT
from moestro.engine.registry import BATCH_POLICIES, EVICT_POLICIES, ORDER_POLICIES
from moestro.flow.registry import STEP_POLICIES
from moestro.routing.registry import ROUTE_POLICIES
from moestro.web.access_settings import AccessSettings

NETWORK_GROUP = Group.create_ordered("Model", help="What is loaded, and how.")
_MEMORY = Group.create_ordered("Memory", help="How long sequences may be, and how many fit.")
_SCHEDULING = Group.create_ordered("Scheduling", help="What one engine does in one step.")
_SERVER = Group.create_ordered("Server", help="Where clients reach it, and who may.")
_ENGINES = Group.create_ordered("Engines", help="The processes behind the front door.")
CONFIG_GROUP = Group.create_ordered("Configuration", help="Settings from a file.")


def _policy(group: Group, question: str, kind: PolicyKind[PolicyT]) -> Parameter:
    """A flag that names a policy; its help lists the policies of `kind`."""
    return Parameter(group=group, help=f"{question}\n\n{kind.help_text()}", show_choices=False)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """The network."""

    tokenizer: Annotated[Path | None, Parameter(group=NETWORK_GROUP)] = None
    "Directory with tokenizer.json and the chat template, if it is not the model's own."
    dtype: Annotated[Dtype, Parameter(group=NETWORK_GROUP)] = "auto"
    "Of weights, activations and KV cache; auto: what the checkpoint was saved in."
    device: Annotated[str, Parameter(group=NETWORK_GROUP)] = "auto"
    "Where it runs: cpu, cuda, auto (an accelerator if there is one), or paced:h20, modelled durations of MODEL there."
    paced_arithmetic: Annotated[PacedArithmetic, Parameter(group=NETWORK_GROUP)] = "demo"
    "What a paced device answers: demo: tokens of the demo model; none: a fixed sequence, and torch is not loaded."
    load_format: Annotated[LoadFormat, Parameter(group=NETWORK_GROUP)] = "auto"
    "dummy: random weights of the right shapes, to measure speed without a download."
    gate_override: Annotated[str | None, Parameter(group=NETWORK_GROUP)] = None
    "Replace the gate's choice of experts to study load: uniform, exponential:LAMBDA or trace:FILE."
    generation_config: Annotated[GenerationConfig, Parameter(group=NETWORK_GROUP)] = "auto"
    "Sampling defaults where a request names none; auto: the checkpoint's generation_config.json; vllm: neutral ones."
    seed: Annotated[int, Parameter(group=NETWORK_GROUP)] = 0
    "Of dummy weights and of the gate override. Requests bring their own seeds."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class MemoryFlags:
    """The KV cache."""

    max_model_len: Annotated[int | None, Parameter(group=_MEMORY)] = None
    "Tokens of the longest sequence, prompt and answer; unset: what the model was made for, if it fits."
    block_size: Annotated[int, Parameter(group=_MEMORY)] = 16
    "Tokens of one KV block: the grain of memory and of prefix caching."
    kv_cache_memory_bytes: Annotated[int | None, Parameter(group=_MEMORY)] = None
    "Bytes of KV cache of each engine; more of it: more sequences at once. Unset: 1 GiB, or what a paced GPU has left."
    num_gpu_blocks_override: Annotated[int | None, Parameter(group=_MEMORY)] = None
    "KV blocks of each engine, whatever the bytes above say; for experiments with scarce memory."
    kv_offloading_size: Annotated[float | None, Parameter(group=_MEMORY)] = None
    "GiB of host memory, for each engine, that keep the KV of preempted requests. Unset: it is computed again."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SchedulingFlags:
    """One engine's scheduler."""

    max_num_seqs: Annotated[int, Parameter(group=_SCHEDULING)] = 64
    "Sequences that run at once. More of them: more tokens per second in all, fewer for each."
    max_num_batched_tokens: Annotated[int, Parameter(group=_SCHEDULING)] = 2048
    "Tokens of one step. Lower: long prompts disturb running answers less, and take longer themselves."
    max_num_queued_reqs: Annotated[int, Parameter(group=_SCHEDULING)] = 1024
    "Requests that may wait; one more is refused with 503 and Retry-After."
    scheduling_policy: Annotated[
        str,
        _policy(_SCHEDULING, "Which waiting request is next (sjf:theta_age_s=2).", ORDER_POLICIES),
    ] = "fcfs"
    batch_policy: Annotated[
        str, _policy(_SCHEDULING, "Which sequences enter the next step (qllm:max_batch=16).", BATCH_POLICIES)
    ] = "decode_first"
    evict_policy: Annotated[
        str, _policy(_SCHEDULING, "Which sequence frees its KV where blocks run out; or FILE.py:NAME.", EVICT_POLICIES)
    ] = "last_in_order"
    enable_prefix_caching: Annotated[bool, Parameter(group=_SCHEDULING)] = True
    "Compute the common beginning of prompts once."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SteppingFlags:
    """In which pieces one engine computes."""

    mode: Annotated[Mode, Parameter(group=_SCHEDULING)] = "fused"
    (
        "fused: one forward pass a step. preemptive: a step stops between any two expert batches when a request with"
        ' "service_class": "ls" comes, and goes on from there later; requests that do not say are "ls". With'
        " --scheduling-policy qllm --evict-policy least_computed_be_first they also come first where KV is scarce."
    )
    step_policy: Annotated[
        str, _policy(_SCHEDULING, "In preemptive mode, what runs next; or FILE.py:NAME.", STEP_POLICIES)
    ] = "qllm"
    pass_decodes: Annotated[bool, Parameter(group=_SCHEDULING)] = False
    (
        'In preemptive mode, "ls" requests pass a step of "be" requests for each of their tokens, not for the first'
        " alone: their answers come sooner, in small batches, and all others and the throughput pay for it."
    )
    max_be_wait: Annotated[float, Parameter(group=_SCHEDULING)] = 1.0
    (
        'In preemptive mode, seconds for which "be" requests may stand still in one step while "ls" requests that came'
        " later run; then they run first until the step is over. inf means no limit."
    )
    max_parked_bytes: Annotated[int | None, Parameter(group=_SCHEDULING)] = None
    "In preemptive mode, bytes of the KV cache's memory for what is inside the network; unset: two full steps."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ServerFlags:
    """The front door."""

    host: Annotated[str, Parameter(group=_SERVER)] = "127.0.0.1"
    "Address to listen on; 0.0.0.0 opens it to the network, which wants --api-key."
    port: Annotated[int, Parameter(group=_SERVER)] = 8000
    "Port to listen on; 0: any free one, shown at the start."
    served_model_name: Annotated[tuple[str, ...], Parameter(group=_SERVER, consume_multiple=True)] = ()
    "What clients call the model, one or more names; unset: what you called it."
    api_key: Annotated[tuple[str, ...], Parameter(group=_SERVER, consume_multiple=True, show_default=False)] = ()
    "Keys of which clients must send one, as a bearer token or in x-api-key. Unset: no key is asked for."
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Parameter(group=_SERVER)] = "info"
    "How much is logged. Prompts and answers are never logged."
    record: Annotated[Path | None, Parameter(group=_SERVER)] = None
    "Append a line for each answered request to this file, without its text, for moestro sim --replay."
    shutdown_timeout: Annotated[float, Parameter(group=_SERVER)] = 10.0
    "Seconds that running requests have to finish after SIGTERM or Ctrl-C."
    write_timeout: Annotated[float, Parameter(group=_SERVER)] = 60.0
    "Seconds that a client may leave its stream unread before it is cut off."
    max_connections: Annotated[int, Parameter(group=_SERVER)] = 4096
    "Clients connected at a time; one more is refused with 503 and Retry-After."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """The rank processes."""

    engines: Annotated[int, Parameter(group=_ENGINES)] = 1
    "Processes, each with the whole model; requests are spread over them."
    route_policy: Annotated[
        str,
        _policy(
            _ENGINES,
            "Which engine gets a request (bailian:hit_weight=0.5); or FILE.py:NAME.",
            ROUTE_POLICIES,
        ),
    ] = "moestro"
    route_score: Annotated[str | None, Parameter(group=_ENGINES)] = None
    "In place of a policy: an expression over indicators, the lowest wins: 'p_tokens * (batch_size + 1)'."
    kv_events_config: Annotated[str | None, Parameter(group=_ENGINES)] = None
    (
        "What each engine tells routers of its prefix cache, as vLLM is told it:"
        """ '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:6557"}'."""
        " Engine r listens on port + r; there is no password."
    )
    startup_timeout: Annotated[float, Parameter(group=_ENGINES)] = 600.0
    "Seconds that engines have to be ready."
    engine_timeout: Annotated[float, Parameter(group=_ENGINES)] = 10.0
    "Seconds without a sign of life, while the server runs, after which an engine is killed and started again."
    watchdog_timeout: Annotated[float, Parameter(group=_ENGINES)] = 30.0
    "Seconds without a step, although it has requests, after which an engine's stacks are dumped and it gets no more."
    step_timeout: Annotated[float, Parameter(group=_ENGINES)] = 300.0
    "Seconds without a step after which it is killed and started again: longer than any step may take."
    resume_streams: Annotated[bool, Parameter(group=_ENGINES)] = False
    (
        "When an engine ends, its streams continue on another one in bfloat16 and float16 too, where the continuation"
        " may differ from what the first engine would have sent. Unset: such a stream ends with an error event."
    )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ServeFlags:
    """All of `moestro serve`."""

    network: ModelFlags = field(default_factory=ModelFlags)
    memory: MemoryFlags = field(default_factory=MemoryFlags)
    scheduling: SchedulingFlags = field(default_factory=SchedulingFlags)
    stepping: SteppingFlags = field(default_factory=SteppingFlags)
    server: ServerFlags = field(default_factory=ServerFlags)
    access: AccessSettings = field(default_factory=AccessSettings)
    engines: EngineFlags = field(default_factory=EngineFlags)
