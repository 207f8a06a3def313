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

NETWORK_GROUP = Group.create_ordered("Model", help="The model, and how it is loaded.")
_MEMORY = Group.create_ordered("Memory", help="The length and the number of sequences.")
_SCHEDULING = Group.create_ordered("Scheduling", help="The contents of one step of one engine.")
_SERVER = Group.create_ordered("Server", help="The address of the server, and the access to it.")
_ENGINES = Group.create_ordered("Engines", help="The processes behind the API server.")
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
    "Data type of weights, activations and KV cache; auto: that of the checkpoint."
    device: Annotated[str, Parameter(group=NETWORK_GROUP)] = "auto"
    "cpu, cuda, auto (an accelerator if there is one), or paced:h20 (modelled durations of MODEL on that GPU)."
    paced_arithmetic: Annotated[PacedArithmetic, Parameter(group=NETWORK_GROUP)] = "demo"
    "Answers of a paced device. demo: tokens of the demo model; none: a fixed text, without loading torch."
    load_format: Annotated[LoadFormat, Parameter(group=NETWORK_GROUP)] = "auto"
    "dummy: random weights of the right shapes, to measure speed without a download."
    gate_override: Annotated[str | None, Parameter(group=NETWORK_GROUP)] = None
    "Replace the gate's choice of experts to study load: uniform, exponential:LAMBDA or trace:FILE."
    generation_config: Annotated[GenerationConfig, Parameter(group=NETWORK_GROUP)] = "auto"
    "Sampling defaults where a request names none; auto: the checkpoint's generation_config.json; vllm: neutral ones."
    seed: Annotated[int, Parameter(group=NETWORK_GROUP)] = 0
    "Random seed for dummy weights and the gate override. Requests have their own seeds."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class MemoryFlags:
    """The KV cache."""

    max_model_len: Annotated[int | None, Parameter(group=_MEMORY)] = None
    "Tokens of the longest sequence, prompt and answer. Unset: the limit of the model, if it fits."
    block_size: Annotated[int, Parameter(group=_MEMORY)] = 16
    "Tokens of one KV block, the unit of memory and of prefix caching."
    kv_cache_memory_bytes: Annotated[int | None, Parameter(group=_MEMORY)] = None
    "Bytes of KV cache of each engine; more bytes hold more sequences. Unset: 1 GiB, or the rest of a paced GPU."
    num_gpu_blocks_override: Annotated[int | None, Parameter(group=_MEMORY)] = None
    "KV blocks of each engine, in place of the bytes above; for experiments with scarce memory."
    kv_offloading_size: Annotated[float | None, Parameter(group=_MEMORY)] = None
    "GiB of host memory of each engine for the KV of preempted requests. Unset: the KV is computed again."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SchedulingFlags:
    """One engine's scheduler."""

    max_num_seqs: Annotated[int, Parameter(group=_SCHEDULING)] = 64
    "Sequences that run at once. More sequences mean more tokens per second in all, and fewer for each."
    max_num_batched_tokens: Annotated[int, Parameter(group=_SCHEDULING)] = 2048
    "Tokens of one step. With fewer tokens, long prompts delay running answers less, and take longer themselves."
    max_num_queued_reqs: Annotated[int, Parameter(group=_SCHEDULING)] = 1024
    "Requests that may wait; a further one is refused with 503 and Retry-After."
    scheduling_policy: Annotated[
        str,
        _policy(_SCHEDULING, "Which waiting request is next (sjf:theta_age_s=2).", ORDER_POLICIES),
    ] = "fcfs"
    batch_policy: Annotated[
        str, _policy(_SCHEDULING, "The sequences of the next step (qllm:max_batch=16).", BATCH_POLICIES)
    ] = "decode_first"
    evict_policy: Annotated[
        str,
        _policy(_SCHEDULING, "The sequence that frees its KV when blocks run out; or FILE.py:NAME.", EVICT_POLICIES),
    ] = "last_in_order"
    enable_prefix_caching: Annotated[bool, Parameter(group=_SCHEDULING)] = True
    "Compute the common prefix of prompts once."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SteppingFlags:
    """In which pieces one engine computes."""

    mode: Annotated[Mode, Parameter(group=_SCHEDULING)] = "fused"
    (
        "fused: one forward pass a step. preemptive: a step stops between any two expert batches when a request with"
        ' "service_class": "ls" arrives, and later continues from there; requests that do not say are "ls". With'
        " --scheduling-policy qllm --evict-policy least_computed_be_first they also come first where KV is scarce."
    )
    step_policy: Annotated[
        str, _policy(_SCHEDULING, "In preemptive mode, what runs next; or FILE.py:NAME.", STEP_POLICIES)
    ] = "qllm"
    pass_decodes: Annotated[bool, Parameter(group=_SCHEDULING)] = False
    (
        'In preemptive mode, "ls" requests pass a step of "be" requests for each of their tokens, not for the first'
        " alone: their answers end sooner, in small batches, at the cost of all others and of the throughput."
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
    "Address to listen on; 0.0.0.0 opens the server to the network: set --api-key too."
    port: Annotated[int, Parameter(group=_SERVER)] = 8000
    "Port to listen on; 0: a free port, shown at the start."
    served_model_name: Annotated[tuple[str, ...], Parameter(group=_SERVER, consume_multiple=True)] = ()
    "One or more names of the model for clients. Unset: the name on the command line."
    api_key: Annotated[tuple[str, ...], Parameter(group=_SERVER, consume_multiple=True, show_default=False)] = ()
    "Accepted keys: clients send one as a bearer token or in x-api-key. Unset: no key is required."
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Parameter(group=_SERVER)] = "info"
    "The least severe level that is logged. Prompts and answers are never logged."
    record: Annotated[Path | None, Parameter(group=_SERVER)] = None
    "Append a line without text for each answered request to this file, for moestro sim --replay."
    shutdown_timeout: Annotated[float, Parameter(group=_SERVER)] = 10.0
    "Seconds that running requests have to finish after SIGTERM or Ctrl-C."
    write_timeout: Annotated[float, Parameter(group=_SERVER)] = 60.0
    "Seconds that a client may leave its stream unread before it is disconnected."
    max_connections: Annotated[int, Parameter(group=_SERVER)] = 4096
    "Clients connected at a time; a further one is refused with 503 and Retry-After."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """The rank processes."""

    engines: Annotated[int, Parameter(group=_ENGINES)] = 1
    "Number of engines, each a process with the whole model; a router spreads requests over them."
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
        "KV events that each engine publishes for routers, in the form of vLLM:"
        """ '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:6557"}'."""
        " Engine r listens on port + r; there is no password."
    )
    startup_timeout: Annotated[float, Parameter(group=_ENGINES)] = 600.0
    "Seconds in which engines must become ready."
    engine_timeout: Annotated[float, Parameter(group=_ENGINES)] = 10.0
    "Seconds without a message, while the server runs, after which an engine is killed and restarted."
    watchdog_timeout: Annotated[float, Parameter(group=_ENGINES)] = 30.0
    "Seconds without a step, despite requests, after which an engine's stacks are dumped and it gets no new ones."
    step_timeout: Annotated[float, Parameter(group=_ENGINES)] = 300.0
    "Seconds without a step after which an engine is killed and restarted; set it above the longest step."
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
