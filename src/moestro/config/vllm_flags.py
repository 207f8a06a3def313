"""Flags of `vllm serve` that `moestro serve` does not have: those that change nothing here, and those that would."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from moestro.errors import ConfigError

logger = logging.getLogger(__name__)

_EXPERTS = "--mode ep or --mode async with --engines, --attention and --experts spreads the experts over devices"
_ENGINES = "--engines N starts N engines behind one server, and moestro route stands before several servers"
_MACHINES = "--launcher ray places the processes on several machines"
_WORKERS = "in --mode async, workers are added and drained at /admin/workers"
_PLACEMENT = "--placement-policy moves and copies experts while the server runs"
_ALWAYS = "Moestro always does this"
_GRAPHS = "Moestro chooses which steps it records as CUDA graphs"
_KERNELS = "Moestro chooses its kernels by the device"
_LORA = "LoRA adapters are out of scope"
_MEDIA = "input is text only"
_REMOTE_CODE = "a checkpoint's own code is never run"
_NO_LOG = "prompts are never logged, and there is no access log"
_HUB = "download the checkpoint, and name its directory"
_MEMORY = "--kv-cache-memory-bytes gives the size of each engine's KV cache"
_CHUNKS = "prompts are computed in chunks; --batch-policy and --max-num-batched-tokens choose them"
_LOADING = "each engine loads its weights by itself, from safetensors files"
_SERVED = "only generation is served"
_LAYER = "one layer is not split; " + _EXPERTS
_SEQUENCE = "one sequence is computed by one engine"
_OLD = "vLLM has dropped this flag"
_GRAMMARS = "structured output has one backend"


@dataclass(frozen=True, slots=True)
class VllmFlag:
    """A flag of vLLM alone.

    Attributes:
        text: why it changes nothing, or what to do in its place; part of a sentence.
        is_taken: whether any value of it changes nothing here.
        values: how many values follow the flag.
        neutral: values that change nothing, of a flag that else ends the start.
    """

    text: str
    is_taken: bool
    values: Literal["none", "one", "many"] = "one"
    neutral: frozenset[str] = frozenset()

    def changes_nothing(self, value: str | None, *, is_negated: bool) -> bool:
        """Whether the flag with this value changes nothing here. None means that no value was given."""
        is_off = self.values == "none" and (is_negated or value in {"false", "False"})
        return self.is_taken or is_off or value in self.neutral


def _switches(text: str, *names: str, is_taken: bool = True) -> dict[str, VllmFlag]:
    return dict.fromkeys(names, VllmFlag(text, is_taken=is_taken, values="none"))


def _taken(text: str, *names: str, values: Literal["one", "many"] = "one") -> dict[str, VllmFlag]:
    return dict.fromkeys(names, VllmFlag(text, is_taken=True, values=values))


def _refused(text: str, *names: str, neutral: Iterable[str] = ()) -> dict[str, VllmFlag]:
    return dict.fromkeys(names, VllmFlag(text, is_taken=False, neutral=frozenset(neutral)))


# Names as in vLLM 0.33, and some that it has dropped and that start scripts still have.
VLLM_FLAGS: dict[str, VllmFlag] = {
    # What changes no answer and needs nothing that is missing.
    **_taken(_GRAPHS, "--compilation-config", "--max-seq-len-to-capture", "--max-cudagraph-capture-size"),
    **_taken(_GRAPHS, "--optimization-level", "--performance-mode"),
    **_taken(_GRAPHS, "--max-context-len-to-capture"),
    **_taken(_GRAPHS, "--cudagraph-capture-sizes", "--cuda-graph-sizes", values="many"),
    **_taken(_KERNELS, "--attention-backend", "--attention-config", "--kernel-config", "--moe-backend"),
    **_taken(_KERNELS, "--all2all-backend", "--linear-backend"),
    **_switches(_KERNELS, "--disable-cascade-attn", "--disable-custom-all-reduce", "--enable-flashinfer-autotune"),
    **_switches(_KERNELS, "--kv-sharing-fast-prefill", "--enable-dbo", "--disable-nccl-for-dp-synchronization"),
    **_taken(_KERNELS, "--dbo-decode-token-threshold", "--dbo-prefill-token-threshold", "--ubatch-size"),
    **_switches(_ALWAYS, "--enable-prompt-tokens-details", "--enable-request-id-headers"),
    **_switches(_ALWAYS, "--enable-server-load-tracking", "--async-scheduling"),
    **_switches(_CHUNKS, "--enable-chunked-prefill", "--disable-chunked-mm-input", "--scheduler-reserve-full-isl"),
    **_taken(_CHUNKS, "--max-num-partial-prefills", "--max-long-partial-prefills", "--long-prefill-token-threshold"),
    **_switches(_NO_LOG, "--disable-log-requests", "--enable-log-requests", "--enable-log-outputs"),
    **_switches(_NO_LOG, "--disable-uvicorn-access-log", "--enable-log-deltas"),
    **_taken(_NO_LOG, "--max-log-len", "--disable-access-log-for-endpoints"),
    **_switches("the log has one form", "--log-error-stack", "--enable-logging-iteration-details"),
    **_taken("the log has one form, and --log-level sets the lowest severity", "--log-config-file"),
    **_switches("no paths start or stop a profiler", "--enable-layerwise-nvtx-tracing"),
    **_taken("no paths start or stop a profiler", "--profiler-config"),
    **_switches("--log-level warning hides the lines of statistics", "--disable-log-stats"),
    **_taken("--log-level sets the lowest severity that is logged", "--uvicorn-log-level"),
    **_switches("/metrics has all figures", "--kv-cache-metrics", "--enable-mfu-metrics", "--cudagraph-metrics"),
    **_taken("/metrics has all figures", "--show-hidden-metrics-for-version", "--kv-cache-metrics-sample"),
    **_switches("one log has the lines of all engines", "--aggregate-engine-logging"),
    **_taken("--kv-offloading-size keeps KV of preempted requests and evicted prefixes in host memory", "--swap-space"),
    **_taken("the KV of preempted requests is computed again", "--preemption-mode"),
    **_switches("the KV cache has the model's dtype", "--calculate-kv-scales"),
    **_switches("all layers share one table of blocks", "--disable-hybrid-kv-cache-manager"),
    **_taken("block hashes are keyed blake2b", "--prefix-caching-hash-algo"),
    **_switches("--bind-cores gives each engine its own cores", "--numa-bind"),
    **_taken("--bind-cores gives each engine its own cores", "--numa-bind-nodes", "--numa-bind-cpus", values="many"),
    **_taken(_SEQUENCE, "--dcp-kv-cache-interleave-size", "--cp-kv-cache-interleave-size", "--dcp-comm-backend"),
    **_taken("the KV cache has the model's dtype", "--kv-cache-dtype-skip-layers", values="many"),
    **_switches(_REMOTE_CODE, "--trust-remote-code"),
    **_taken(_REMOTE_CODE, "--code-revision"),
    **_taken(_LOADING, "--max-parallel-loading-workers", "--safetensors-load-strategy", "--model-loader-extra-config"),
    **_taken(_LOADING, "--pt-load-map-location"),
    **_taken(_LOADING, "--ignore-patterns", values="many"),
    **_switches(_LOADING, "--use-tqdm-on-load"),
    **_taken(_GRAMMARS, "--guided-decoding-backend", "--structured-outputs-config.backend"),
    **_taken(_GRAMMARS, "--guided-decoding-disable-fallback"),
    **_taken("each token is sent at once", "--stream-interval"),
    **_taken("one API server serves all engines; moestro route stands before several servers", "--api-server-count"),
    **_switches("/docs loads nothing from other hosts", "--disable-fastapi-docs", "--enable-offline-docs"),
    **_switches("one process serves the API", "--disable-frontend-multiprocessing"),
    **_taken("separate processes render templates", "--renderer-num-workers"),
    **_taken(_ENGINES, "--data-parallel-supervisor-port", "--dp-supervisor-probe-failure-threshold"),
    **_taken(_ENGINES, "--dp-supervisor-probe-interval-s", "--dp-supervisor-probe-timeout-s"),
    **_switches("Cohere's API is not served", "--cohere-is-reasoning-model"),
    **_taken("Cohere's API is not served", "--cohere-format"),
    **_switches(_SERVED, "--enable-flash-late-interaction"),
    **_taken("heads have bounds of their own", "--h11-max-incomplete-event-size", "--h11-max-header-count"),
    **_switches(_EXPERTS, "--enable-expert-parallel"),
    **_switches(_PLACEMENT, "--enable-eplb", "--eplb-log-balancedness"),
    **_taken(_PLACEMENT, "--eplb-config", "--eplb-window-size", "--eplb-step-interval"),
    **_taken("--init-expert-location names the first placement", "--expert-placement-strategy"),
    **_switches(_MEDIA, "--enable-prompt-embeds", "--skip-mm-profiling", "--interleave-mm-strings"),
    **_switches(_MEDIA, "--language-model-only", "--enable-mm-embeds", "--disable-mm-preprocessor-cache"),
    **_switches(_MEDIA, "--enable-multimodal-encoder-data-parallel"),
    **_taken(_MEDIA, "--limit-mm-per-prompt", "--mm-processor-cache-gb", "--mm-processor-cache-type"),
    **_taken(_MEDIA, "--mm-processor-kwargs", "--mm-encoder-tp-mode", "--media-io-kwargs", "--video-pruning-rate"),
    **_taken(_MEDIA, "--mm-encoder-attn-backend", "--mm-shm-cache-max-object-size-mb", "--allowed-local-media-path"),
    **_taken(_MEDIA, "--allowed-media-domains", values="many"),
    **_taken("hybrid and recurrent networks are out of scope", "--mamba-cache-dtype", "--mamba-ssm-cache-dtype"),
    **_taken("hybrid and recurrent networks are out of scope", "--mamba-block-size", "--mamba-cache-mode"),
    **_taken("hybrid and recurrent networks are out of scope", "--mamba-backend", "--mamba-ssu-algorithm"),
    **_taken("hybrid and recurrent networks are out of scope", "--mamba-cache-philox-rounds"),
    **_switches("hybrid and recurrent networks are out of scope", "--enable-mamba-cache-stochastic-rounding"),
    **_switches("--reasoning-parser alone is enough", "--enable-reasoning"),
    **_switches(_OLD, "--use-v2-block-manager", "--multi-step-stream-outputs", "--ray-workers-use-nsight"),
    **_switches(_OLD, "--disable-async-output-proc", "--engine-use-ray"),
    **_taken(_OLD, "--num-scheduler-steps", "--num-lookahead-slots", "--scheduler-delay-factor"),
    **_taken(_OLD, "--tokenizer-pool-size", "--tokenizer-pool-type", "--tokenizer-pool-extra-config"),
    # What would change answers, or needs what is missing, unless its value is neutral.
    **_refused(_LAYER, "--tensor-parallel-size", neutral=["1"]),
    **_refused(_EXPERTS, "--pipeline-parallel-size", neutral=["1"]),
    **_refused(_SEQUENCE, "--decode-context-parallel-size", "--prefill-context-parallel-size", neutral=["1"]),
    **_refused(_ENGINES, "--data-parallel-size", "--data-parallel-size-local", neutral=["1"]),
    **_refused(_ENGINES, "--data-parallel-rank", "--data-parallel-start-rank", neutral=["0"]),
    **_switches(_ENGINES, "--data-parallel-external-lb", "--data-parallel-hybrid-lb", is_taken=False),
    **_refused(_MACHINES, "--data-parallel-address", "--data-parallel-rpc-port", "--master-addr", "--master-port"),
    **_refused(_MACHINES, "--distributed-executor-backend", neutral=["mp", "uni"]),
    **_refused(_MACHINES, "--data-parallel-backend", neutral=["mp"]),
    **_refused(_MACHINES, "--nnodes", neutral=["1"]),
    **_refused(_MACHINES, "--node-rank", neutral=["0"]),
    **_switches(_MACHINES, "--headless", "--worker-use-ray", is_taken=False),
    **_switches(
        "in --mode async, workers are added and drained at /admin/workers", "--enable-elastic-ep", is_taken=False
    ),
    **_refused(
        "--kv-offloading-size keeps KV of preempted requests and evicted prefixes there; weights stay on the device",
        "--cpu-offload-gb",
        neutral=["0", "0.0"],
    ),
    **_refused(
        "--kv-offloading-size keeps KV of preempted requests and evicted prefixes in host memory, by one backend",
        "--kv-offloading-backend",
        neutral=["native"],
    ),
    **_refused(_MEMORY, "--kv-cache-memory"),
    **_refused("the KV cache has the model's dtype", "--quantization-param-path"),
    **_refused("attention computes in the model's dtype", "--override-attention-dtype"),
    **_refused("the KV cache has the model's dtype", "--kv-cache-dtype", neutral=["auto"]),
    **_refused(
        "a checkpoint's config.json names its format: FP8 and MXFP4 are read, other quantised formats are refused",
        "--quantization",
    ),
    **_refused("prefill and decode are not separated", "--kv-transfer-config", "--ec-transfer-config"),
    **_refused("speculative decoding is out of scope", "--speculative-config", "--speculative-model"),
    **_refused("speculative decoding is out of scope", "--ngram-prompt-lookup-max", "--ngram-prompt-lookup-min"),
    **_refused("speculative decoding is out of scope", "--spec-decoding-acceptance-method"),
    **_refused("speculative decoding is out of scope", "--speculative-draft-tensor-parallel-size"),
    **_refused("speculative decoding is out of scope", "--num-speculative-tokens", neutral=["0"]),
    **_switches("--max-model-len limits prompts to the window", "--disable-sliding-window", is_taken=False),
    **_switches(_LORA, "--enable-lora", "--enable-lora-bias", "--fully-sharded-loras", is_taken=False),
    **_refused(_LORA, "--lora-extra-vocab-size", "--default-mm-loras", "--long-lora-scaling-factors"),
    **_refused(_LORA, "--qlora-adapter-name-or-path"),
    **_switches("prompt adapters are out of scope", "--enable-prompt-adapter", is_taken=False),
    **_refused("prompt adapters are out of scope", "--max-prompt-adapters", "--max-prompt-adapter-token"),
    **_refused(_LORA, "--lora-modules", "--max-cpu-loras", "--max-lora-rank", "--max-loras", "--lora-dtype"),
    **_refused("a checkpoint has Hugging Face's format", "--config-format", neutral=["auto", "hf"]),
    **_refused("networks are those of transformers", "--model-impl", neutral=["auto", "vllm", "transformers"]),
    **_refused(_SERVED, "--convert", neutral=["auto", "none"]),
    **_refused(_SERVED, "--runner", "--task", neutral=["auto", "generate"]),
    **_refused(_SERVED, "--io-processor-plugin", "--pooler-config", "--override-pooler-config"),
    **_switches("all paths are served", "--tokens-only", is_taken=False),
    **_refused(_HUB, "--download-dir", "--hf-config-path"),
    **_refused(_HUB, "--revision", "--tokenizer-revision", neutral=["main"]),
    **_refused("edit the checkpoint's config.json", "--hf-overrides", neutral=["{}"]),
    **_refused("edit the checkpoint's config.json", "--rope-scaling", "--rope-theta"),
    **_refused("set the environment variable HF_TOKEN", "--hf-token"),
    **_refused("send the values with each request, or edit generation_config.json", "--override-generation-config"),
    **_refused("only tokenizers with a tokenizer.json are loaded", "--tokenizer-mode", neutral=["auto", "hf", "fast"]),
    **_switches("the server always tokenizes", "--skip-tokenizer-init", is_taken=False),
    **_refused(
        "the content of a message is given to the template as one text",
        "--chat-template-content-format",
        neutral=["auto", "string"],
    ),
    **_refused("answers have the role assistant", "--response-role", neutral=["assistant"]),
    **_refused("--tool-call-parser has one of Moestro's parsers", "--tool-parser-plugin", "--reasoning-parser-plugin"),
    **_refused("the server runs no tools", "--tool-server"),
    **_refused(
        "thinking_token_budget ends reasoning with the end tag of --reasoning-parser",
        "--reasoning-config",
        neutral=["{}"],
    ),
    **_switches("input and output are text only", "--omni", is_taken=False),
    **_refused(_GRAMMARS, "--structured-outputs-config", neutral=["{}"]),
    **_refused(
        "send disable_any_whitespace in structured_outputs with a request",
        "--guided-decoding-disable-any-whitespace",
        neutral=["False", "false"],
    ),
    **_refused(
        "a schema's own additionalProperties holds",
        "--guided-decoding-disable-additional-properties",
        neutral=["False", "false"],
    ),
    **_refused("logit_bias, bad_words and allowed_token_ids of a request edit its logits", "--logits-processors"),
    **_refused(
        "logit_bias, bad_words and allowed_token_ids of a request edit its logits", "--logits-processor-pattern"
    ),
    **_refused("log probabilities are those of the raw distribution", "--logprobs-mode", neutral=["raw_logprobs"]),
    **_refused("a request may ask for 20 alternatives at most", "--max-logprobs", neutral=["20"]),
    **_switches("send return_tokens_as_token_ids with a request", "--return-tokens-as-token-ids", is_taken=False),
    **_refused("send truncate_prompt_tokens with a request", "--truncate-prompt-tokens"),
    **_switches("/admin/experts exports the load of experts", "--enable-return-routed-experts", is_taken=False),
    **_switches("stop the server, and start it again", "--enable-sleep-mode", is_taken=False),
    **_refused("stop the server, and start it with the new weights", "--weight-transfer-config"),
    **_switches("--record writes the times of each request", "--enable-per-request-metrics", is_taken=False),
    **_refused("system_fingerprint is made of the version, the settings and the model", "--fingerprint-value"),
    **_refused(
        "system_fingerprint is made of the version, the settings and the model",
        "--fingerprint-mode",
        neutral=["full", "hash"],
    ),
    **_refused("the server listens on --host and --port", "--uds"),
    **_refused("--max-num-queued-reqs limits the queue", "--max-num-queued-tokens"),
    **_refused("--scheduling-policy names the order; CONTRIBUTING.md says how to add one", "--scheduler-cls"),
    **_refused("--device chooses the worker", "--worker-cls", neutral=["auto"]),
    **_refused("--device chooses the worker", "--worker-extension-cls", "--additional-config"),
    **_refused("--otlp-traces-endpoint sends all spans that there are", "--collect-detailed-traces"),
    **_refused("put a proxy in front of the server", "--middleware"),
}
_ONE = VllmFlag("", is_taken=False)  # Any flag with one value.
_SHORT = {
    "-O": "--optimization-level",
    "-ac": "--attention-config",
    "-asc": "--api-server-count",
    "-cc": "--compilation-config",
    "-dcp": "--decode-context-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpa": "--data-parallel-address",
    "-dpb": "--data-parallel-backend",
    "-dpl": "--data-parallel-size-local",
    "-dpn": "--data-parallel-rank",
    "-dpp": "--data-parallel-rpc-port",
    "-dpr": "--data-parallel-start-rank",
    "-ep": "--enable-expert-parallel",
    "-n": "--nnodes",
    "-pcp": "--prefill-context-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-q": "--quantization",
    "-r": "--node-rank",
    "-sc": "--speculative-config",
    "-tp": "--tensor-parallel-size",
}


# Moestro's own flags whose value is a JSON object. As in vLLM, `--FLAG.KEY VALUE` sets one key of it.
_OBJECTS = frozenset({"--default-chat-template-kwargs", "--kv-events-config"})


def without_vllm_flags(arguments: Sequence[str]) -> list[str]:
    """Return a command line without the flags of vLLM that change nothing here; one warning names these.

    Keys of a JSON object that are given one by one become one flag with the object.

    Raises:
        ConfigError: A flag of vLLM would change answers, or needs what is missing; the text says what to do.
    """
    kept: list[str] = []
    taken: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            kept += [argument, *rest]
            break
        name, has_value, value = argument.partition("=")
        flag, own = flag_named(name), name.partition(".")[0].replace("_", "-")
        if own in _OBJECTS and "." in name:
            _set_key(objects.setdefault(own, {}), name, value if has_value else next(iter(_values(_ONE, rest)), None))
            continue
        if flag is None:
            kept.append(argument)
            continue
        values = [value] if has_value else _values(flag, rest)
        take_or_refuse(name, values[0] if values else None)
        taken.append(name)
    warn_of_taken(taken)
    if both := objects.keys() & {each.partition("=")[0].replace("_", "-") for each in kept}:
        flag_of_both = min(both)
        raise ConfigError(f"{flag_of_both} is given as a whole and by its keys ({flag_of_both}.KEY): give one of them")
    return [*(part for own, keys in objects.items() for part in (own, json.dumps(keys))), *kept]


def _set_key(keys: dict[str, Any], name: str, value: str | None) -> None:
    """Set the value at the path `FLAG.KEY.KEY`: JSON, or a text.

    Raises:
        ConfigError: The value is missing, or a part of the path has a value that is no object.
    """
    *path, last = name.split(".")[1:]
    for each in path:
        keys = keys.setdefault(each, {})
        if not isinstance(keys, dict):
            raise ConfigError(f"{name}: {each} has a value already, which is no JSON object")
    if value is None or not last:
        raise ConfigError(
            f"{name} sets one key of a JSON object: give {name.rstrip('.')}{'' if last else '.KEY'} VALUE"
        )
    try:
        keys[last] = json.loads(value)
    except json.JSONDecodeError:
        keys[last] = value


def take_or_refuse(name: str, value: str | None) -> None:
    """Return if a flag of vLLM alone changes nothing with this value.

    Raises:
        ConfigError: It would change answers, or needs what is missing.
    """
    flag = flag_named(name)
    assert flag is not None
    if not flag.changes_nothing(value, is_negated=name.startswith(("--no-", "--no_"))):
        given = f" {value}" if flag.neutral and value is not None else ""
        raise ConfigError(f"{name}{given} is a flag of vLLM and not supported, see docs/scope.md: {flag.text}")


def warn_of_taken(names: Sequence[str]) -> None:
    """Log one warning that names the flags of vLLM that change nothing here; no names give none."""
    known = {name: flag for name in names if (flag := flag_named(name)) is not None}
    if known:
        reasons = "; ".join(f"{name} ({flag.text})" for name, flag in known.items())
        logger.warning("flags of vLLM that change nothing here: %s", reasons)


def flag_named(name: str) -> VllmFlag | None:
    """Return the flag of vLLM alone of this name; None if it is none. `_` and `-` mean the same."""
    if name.startswith("-O") and name[2:3] in "0123456789.":
        name = "-O"
    short, dot, key = name.partition(".")
    name = (_SHORT.get(short, short) + dot + key).replace("_", "-")
    names = (name, name.replace("--no-", "--", 1), name.partition(".")[0])
    return next((VLLM_FLAGS[each] for each in names if each in VLLM_FLAGS), None)


def _values(flag: VllmFlag, rest: list[str]) -> list[str]:
    """Take the values of `flag` from the arguments that follow it; older scripts give a switch its value too."""
    if flag.values == "none" and rest and rest[0] in {"True", "False", "true", "false"}:
        return [rest.pop(0)]
    most = {"none": 0, "one": 1, "many": len(rest)}[flag.values]
    values: list[str] = []
    while rest and len(values) < most and not rest[0].startswith("--"):
        values.append(rest.pop(0))
    return values
