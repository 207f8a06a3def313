"""`moestro calibrate`: measures the cost of a model's steps."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Annotated

from cyclopts import Parameter

from moestro.calibrate.settings import MODEL_GROUP, MeasuredModel, Measuring, Range, ServerProbing
from moestro.cli.app import app, loading, require_extra
from moestro.config.cores import thread_environment
from moestro.config.user_files import check_files
from moestro.core.setting_checks import flag_of
from moestro.errors import ConfigError
from moestro.model.settings import DEMO_MODEL


@app.command
def calibrate(
    model: Annotated[str, Parameter(group=MODEL_GROUP)] = DEMO_MODEL,
    *,
    network: MeasuredModel = MeasuredModel(),
    reach: Range = Range(),
    server: ServerProbing = ServerProbing(),
    measuring: Measuring = Measuring(),
) -> None:
    """Measure what a model's steps cost, here or on a running server, and write a cost table for the simulator.

    With --server, probes of many lengths and batch sizes are sent to any OpenAI-compatible server, and nothing is
    loaded here. Costs of steps, the token budget, the maximum batch, the KV cache and its blocks are estimated with
    95 % intervals. What the probes do not determine is named. A second file, --out with the ending .toml, describes the
    engine: the simulator takes it as [engines], and the router predicts with it (--route-policy llm-d:prices=FILE).

    * moestro calibrate --server http://127.0.0.1:8000 --out engine.json probes an idle server for five minutes.
    * moestro calibrate --server URL --max-added-load 0.1 probes beside traffic, a tenth of the time.

    Without --server, the network is loaded as a server loads it, in this process. Each measurement is repeated several
    times: prefill chunks of many sizes behind prefixes of many lengths, and decodes with many numbers of sequences and
    contexts. Batches of other shapes then check the prices. Let nothing else run meanwhile, and use as many threads as
    the server will have.

    * moestro calibrate --out demo.json measures the demo model; it takes a minute or two on one core.
    * OMP_NUM_THREADS=1 moestro calibrate DIR --max-num-seqs 16 --max-num-batched-tokens 512 measures a smaller range.
    * moestro calibrate DIR --device cuda --max-num-seqs 256 --kv-cache-memory-bytes 20g measures a GPU.

    Parameters
    ----------
    model
        A checkpoint directory, or a name on the Hugging Face hub. moestro-demo is the small model that comes with
        Moestro.
    """
    from rich.console import Console

    if server.server is not None:
        _refuse_unused(model, network, reach, measuring)
        from moestro.calibrate.probing.verb import calibrate_server

        check_files({"--out": measuring.out.with_suffix(".toml")})
        calibrate_server(server, measuring, Console())
        return
    require_extra("serve", "moestro calibrate")
    os.environ.update(thread_environment(1))  # as in a server's engine; OpenMP reads it when torch is loaded
    with loading("the engine"):
        from moestro.calibrate.runner import CalibrateSettings
        from moestro.calibrate.runner import calibrate as run
        from moestro.config.checkpoint_directory import locate_model

    settings = CalibrateSettings(
        checkpoint=str(locate_model(model)),
        name=model,
        model=network,
        range=reach,
        measuring=measuring,
    )
    run(settings, Console())


def _refuse_unused(model: str, network: MeasuredModel, reach: Range, measuring: Measuring) -> None:
    """Refuse what describes a model that is loaded here, which --server would ignore."""
    if model != DEMO_MODEL:
        raise ConfigError(f"MODEL {model} is loaded in this process, and --server has one: give --served-model {model}")
    for given in (network, reach, measuring):
        for each in fields(given):
            if each.name not in {"out", "seed"} and getattr(given, each.name) != each.default:
                raise ConfigError(
                    f"{flag_of(each.name)} measures a model in this process, and --server a running one: drop one of"
                    " them. The probes are bounded by --seconds, --max-concurrency and --max-prompt-tokens"
                )
