"""Flags of `vllm serve` that `moestro serve` does not have, each with what to do in its place."""

from __future__ import annotations

from collections.abc import Sequence

from moestro.errors import ConfigError

_EXPERTS = "--mode ep or --mode async with --engines, --attention and --experts spreads the experts over devices"
_ENGINES = "--engines N starts N engines behind one server, and moestro route stands before several servers"
_MACHINES = "--launcher ray places the processes on several machines"
_PLACEMENT = "--placement-policy moves and copies experts while the server runs"
_ALWAYS = "Moestro always does this; leave it out"
_EAGER = "Moestro always computes eagerly; leave it out"
_LORA = "LoRA adapters are out of scope"
_MEDIA = "input is text only"
_TLS = "put a TLS proxy in front of the server"
_REMOTE_CODE = "a checkpoint's own code is never run"
_QUANTIZED = "FP8 and MXFP4 checkpoints are dequantised at load; other quantised formats are refused"
_NO_LOG = "prompts are never logged, and there is no access log; leave it out"
_HUB = "download the checkpoint, and name its directory"
_LENGTH = "prompt and answer are limited by --max-model-len"
_MEMORY = "--kv-cache-memory-bytes gives the size of each engine's KV cache"

# Flag -> what to do in its place. Names as in vLLM 0.33.
VLLM_FLAGS: dict[str, str] = {
    "--all2all-backend": _EXPERTS,
    "--api-server-count": "one API server serves all engines; moestro route stands before several servers",
    "--async-scheduling": "leave it out",
    "--attention-backend": "attention has one implementation for each device",
    "--calculate-kv-scales": "the KV cache has the model's dtype",
    "--code-revision": _REMOTE_CODE,
    "--compilation-config": _EAGER,
    "--config-format": "a checkpoint has Hugging Face's format",
    "--convert": "only generation is served",
    "--cpu-offload-gb": "--kv-offloading-size keeps the KV of preempted requests in host memory; weights stay on the"
    " device",
    "--data-parallel-address": _MACHINES,
    "--data-parallel-backend": _MACHINES,
    "--data-parallel-external-lb": _ENGINES,
    "--data-parallel-hybrid-lb": _ENGINES,
    "--data-parallel-rank": _ENGINES,
    "--data-parallel-rpc-port": _MACHINES,
    "--data-parallel-size": _ENGINES,
    "--data-parallel-size-local": _ENGINES,
    "--data-parallel-start-rank": _ENGINES,
    "--decode-context-parallel-size": "one sequence is computed by one engine",
    "--disable-cascade-attn": "leave it out",
    "--disable-custom-all-reduce": "leave it out",
    "--disable-fastapi-docs": "/docs loads nothing from other hosts; leave it out",
    "--disable-log-requests": _NO_LOG,
    "--disable-log-stats": "--log-level warning hides the lines of statistics",
    "--disable-sliding-window": "leave it out",
    "--disable-uvicorn-access-log": _NO_LOG,
    "--distributed-executor-backend": _MACHINES,
    "--download-dir": _HUB,
    "--enable-chunked-prefill": _ALWAYS,
    "--enable-dbo": "leave it out",
    "--enable-elastic-ep": "in --mode async, workers are added and drained at /admin/workers",
    "--enable-eplb": _PLACEMENT,
    "--enable-expert-parallel": _EXPERTS,
    "--enable-log-requests": _NO_LOG,
    "--enable-lora": _LORA,
    "--enable-prompt-embeds": _MEDIA,
    "--enable-prompt-tokens-details": _ALWAYS,
    "--enable-request-id-headers": _ALWAYS,
    "--enable-return-routed-experts": "/admin/experts exports the load of experts",
    "--enable-server-load-tracking": _ALWAYS,
    "--enable-sleep-mode": "stop the server, and start it again",
    "--enforce-eager": _EAGER,
    "--eplb-config": _PLACEMENT,
    "--expert-placement-strategy": "--init-expert-location names the first placement",
    "--gpu-memory-utilization": _MEMORY,
    "--guided-decoding-backend": "structured output has one backend; leave it out",
    "--headless": _MACHINES,
    "--hf-config-path": _HUB,
    "--hf-overrides": "edit the checkpoint's config.json",
    "--hf-token": "set the environment variable HF_TOKEN",
    "--io-processor-plugin": "only generation is served",
    "--kv-cache-dtype": "the KV cache has the model's dtype",
    "--kv-cache-memory": _MEMORY,
    "--kv-sharing-fast-prefill": "leave it out",
    "--kv-transfer-config": "prefill and decode are not separated",
    "--limit-mm-per-prompt": _MEDIA,
    "--logits-processors": "logit_bias, bad_words and allowed_token_ids of a request edit its logits",
    "--logprobs-mode": "log probabilities are those of the raw distribution",
    "--long-prefill-token-threshold": "--max-num-batched-tokens limits the chunks of a prompt",
    "--lora-modules": _LORA,
    "--mamba-cache-dtype": "hybrid and recurrent networks are out of scope",
    "--master-addr": _MACHINES,
    "--master-port": _MACHINES,
    "--max-cpu-loras": _LORA,
    "--max-logprobs": "a request may ask for 20 alternatives at most",
    "--max-long-partial-prefills": "--batch-policy chooses which prompts enter a step",
    "--max-lora-rank": _LORA,
    "--max-loras": _LORA,
    "--max-num-partial-prefills": "--batch-policy chooses which prompts enter a step",
    "--max-num-queued-tokens": "--max-num-queued-reqs limits the queue",
    "--max-parallel-loading-workers": "each engine loads by itself; leave it out",
    "--max-seq-len-to-capture": _EAGER,
    "--middleware": "put a proxy in front of the server",
    "--mm-processor-cache-gb": _MEDIA,
    "--mm-processor-kwargs": _MEDIA,
    "--model-impl": "networks are those of transformers",
    "--nnodes": _MACHINES,
    "--no-enable-chunked-prefill": "prompts are always computed in chunks; raise --max-num-batched-tokens",
    "--node-rank": _MACHINES,
    "--otlp-traces-endpoint": "--record writes each request's way through all levels",
    "--override-generation-config": "send the values with each request, or edit generation_config.json",
    "--pipeline-parallel-size": _EXPERTS,
    "--prefill-context-parallel-size": "one sequence is computed by one engine",
    "--prefix-caching-hash-algo": "block hashes are keyed blake2b; leave it out",
    "--quantization": _QUANTIZED,
    "--return-tokens-as-token-ids": "send return_token_ids with a request",
    "--revision": _HUB,
    "--rope-scaling": "edit the checkpoint's config.json",
    "--rope-theta": "edit the checkpoint's config.json",
    "--runner": "only generation is served",
    "--scheduler-cls": "--scheduling-policy FILE.py:NAME loads an order policy of your own",
    "--skip-tokenizer-init": "the server always tokenizes; leave it out",
    "--speculative-config": "speculative decoding is out of scope",
    "--ssl-ca-certs": _TLS,
    "--ssl-cert-reqs": _TLS,
    "--ssl-certfile": _TLS,
    "--ssl-keyfile": _TLS,
    "--stream-interval": "each token is sent at once; leave it out",
    "--structured-outputs-config": "structured output has one backend; leave it out",
    "--swap-space": "--kv-offloading-size keeps the KV of preempted requests in host memory",
    "--task": "only generation is served",
    "--tensor-parallel-size": "one layer is not split; " + _EXPERTS,
    "--tokenizer-mode": "only tokenizers with a tokenizer.json are loaded",
    "--tokenizer-revision": _HUB,
    "--trust-remote-code": _REMOTE_CODE,
    "--truncate-prompt-tokens": "send truncate_prompt_tokens with a request",
    "--uvicorn-log-level": "--log-level sets the lowest severity that is logged",
    "--worker-cls": "--device chooses the worker",
}
_SHORT = {
    "-O": "--compilation-config",
    "-cc": "--compilation-config",
    "-dcp": "--decode-context-parallel-size",
    "-dp": "--data-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-pp": "--pipeline-parallel-size",
    "-q": "--quantization",
    "-tp": "--tensor-parallel-size",
}


def refuse_vllm_flags(arguments: Sequence[str]) -> None:
    """Raise ConfigError for the first of a command line's arguments that is a flag of vLLM alone."""
    for argument in arguments:
        name = argument.partition("=")[0]
        if (remedy := remedy_of(name)) is not None:
            raise ConfigError(f"{name} is a flag of vLLM and not supported, see docs/scope.md: {remedy}")


def remedy_of(name: str) -> str | None:
    """Return what to do in place of a flag; None if it is no flag of vLLM alone. `_` and `-` mean the same."""
    if name in _SHORT:
        name = _SHORT[name]
    name = name.replace("_", "-")
    return VLLM_FLAGS.get(name) or VLLM_FLAGS.get(name.replace("--no-", "--", 1))
