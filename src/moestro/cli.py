"""The command line. Each verb imports its room when it runs, so that `moestro --help` is quick."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Group, Parameter
from cyclopts.config import Env

from moestro import __version__
from moestro.config import (
    DeviceKind,
    Dtype,
    LoadFormat,
    ModelSettings,
    SchedulerLimits,
    ServerSettings,
    ServeSettings,
)
from moestro.errors import ConfigError, MoestroError

app = App(
    name="moestro",
    help=(
        "One scheduler for Mixture-of-Experts serving, from the cluster down to the expert.\n\n"
        "Every flag can also be set by an environment variable: --max-num-seqs by MOESTRO_MAX_NUM_SEQS."
    ),
    version=__version__,
    config=Env("MOESTRO_", command=False),  # a key belongs in MOESTRO_API_KEY, not in the process list
    default_parameter=Parameter(show_env_var=False, negative_iterable=()),
)

_MODEL = Group.create_ordered("Model", help="What is loaded, and how.")
_MEMORY = Group.create_ordered("Memory", help="How long sequences may be, and how many fit.")
_SCHEDULING = Group.create_ordered("Scheduling", help="What one engine does in one step.")
_SERVER = Group.create_ordered("Server", help="Where clients reach it, and who may.")
_ENGINES = Group.create_ordered("Engines", help="The processes behind the front door.")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """The network."""

    tokenizer: Annotated[Path | None, Parameter(group=_MODEL)] = None
    "Directory with tokenizer.json and the chat template, if it is not the model's own."
    dtype: Annotated[Dtype, Parameter(group=_MODEL)] = "auto"
    "Of weights, activations and KV cache; auto: what the checkpoint was saved in."
    device: Annotated[DeviceKind, Parameter(group=_MODEL)] = "auto"
    "Where it runs; auto: an accelerator if there is one."
    load_format: Annotated[LoadFormat, Parameter(group=_MODEL)] = "auto"
    "dummy: random weights of the right shapes, to measure speed without a download."
    gate_override: Annotated[str | None, Parameter(group=_MODEL)] = None
    "Replace the gate's choice of experts to study load: uniform, exponential:LAMBDA or trace:FILE."
    seed: Annotated[int, Parameter(group=_MODEL)] = 0
    "Of dummy weights and of the gate override. Requests bring their own seeds."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class MemoryFlags:
    """The KV cache."""

    max_model_len: Annotated[int | None, Parameter(group=_MEMORY)] = None
    "Tokens of the longest sequence, prompt and answer; unset: what the model was made for, if it fits."
    block_size: Annotated[int, Parameter(group=_MEMORY)] = 16
    "Tokens of one KV block: the grain of memory and of prefix caching."
    kv_cache_memory_bytes: Annotated[int, Parameter(group=_MEMORY)] = 1 << 30
    "Bytes of KV cache of each engine. More of it: more sequences at once, more prefixes kept."
    num_gpu_blocks_override: Annotated[int | None, Parameter(group=_MEMORY)] = None
    "KV blocks of each engine, whatever the bytes above say; for experiments with scarce memory."


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
    scheduling_policy: Annotated[Literal["fcfs", "priority"], Parameter(group=_SCHEDULING)] = "fcfs"
    "Which waiting request is next: the first that came, or the one with the lowest `priority`."
    enable_prefix_caching: Annotated[bool, Parameter(group=_SCHEDULING)] = True
    "Compute the common beginning of prompts once."


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
    "Keys of which clients must send one as a bearer token; unset: no key is asked for."
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Parameter(group=_SERVER)] = "info"
    "How much is logged. Prompts and answers are never logged."
    shutdown_timeout: Annotated[float, Parameter(group=_SERVER)] = 10.0
    "Seconds that running requests have to finish after SIGTERM or Ctrl-C."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """The rank processes."""

    engines: Annotated[int, Parameter(group=_ENGINES)] = 1
    "Processes, each with the whole model; requests are spread over them."
    route_policy: Annotated[str, Parameter(group=_ENGINES)] = "least_loaded"
    "Which engine gets a request: least_loaded or round_robin."
    startup_timeout: Annotated[float, Parameter(group=_ENGINES)] = 600.0
    "Seconds that engines have to be ready."


@app.command
def serve(
    model: Annotated[str | None, Parameter(group=_MODEL)] = None,
    /,
    *,
    model_flags: ModelFlags = ModelFlags(),
    memory: MemoryFlags = MemoryFlags(),
    scheduling: SchedulingFlags = SchedulingFlags(),
    server: ServerFlags = ServerFlags(),
    engines: EngineFlags = EngineFlags(),
) -> None:
    """Serve a model behind OpenAI's API.

    Parameters
    ----------
    model
        A checkpoint directory, or a name on the Hugging Face hub. Unset: the small demo model that comes with Moestro.
    """
    from moestro.serve.checkpoint import DEMO_NAME, locate_model
    from moestro.serve.server import serve as run

    network, front = asdict(model_flags), asdict(server)
    front["tokenizer"] = network.pop("tokenizer")
    front["served_model_name"] = server.served_model_name or (model or DEMO_NAME,)
    run(
        ServeSettings(
            model=ModelSettings(model=str(locate_model(model)), **network, **asdict(memory)),
            limits=SchedulerLimits(**asdict(scheduling)),
            server=ServerSettings(**front, **asdict(engines)),
        )
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The `moestro` command: exit status 2 for what the operator can put right, 1 for what failed."""
    try:
        app(arguments)
    except MoestroError as error:
        print(f"moestro: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
