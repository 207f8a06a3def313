"""`moestro calibrate`: measures the cost of a model's steps."""

from __future__ import annotations

import os
from typing import Annotated

from cyclopts import Parameter

from moestro.calibrate.settings import MODEL_GROUP, MeasuredModel, Measuring, Range
from moestro.cli.app import app
from moestro.cli.extras import require_extra
from moestro.cli.loading import loading
from moestro.config.cores import thread_environment
from moestro.model.settings import DEMO_MODEL


@app.command
def calibrate(
    model: Annotated[str, Parameter(group=MODEL_GROUP)] = DEMO_MODEL,
    *,
    network: MeasuredModel = MeasuredModel(),
    reach: Range = Range(),
    measuring: Measuring = Measuring(),
) -> None:
    """Measure the duration of a model's steps on this machine, and write a cost table for the simulator.

    The network is loaded as a server loads it, in this process. Each measurement is repeated several times: prefill
    chunks of many sizes behind prefixes of many lengths, and decodes with many numbers of sequences and contexts.
    Batches of other shapes then check the prices of the table. Let nothing else run meanwhile, and use as many threads
    as the server will have.

    * moestro calibrate --out demo.json measures the demo model; it takes a minute or two on one core.
    * OMP_NUM_THREADS=1 moestro calibrate DIR --max-num-seqs 16 --max-num-batched-tokens 512 measures a smaller range.
    * moestro calibrate DIR --device cuda --max-num-seqs 256 --kv-cache-memory-bytes 20g measures a GPU.

    Parameters
    ----------
    model
        A checkpoint directory, or a name on the Hugging Face hub. moestro-demo is the small model that comes with
        Moestro.
    """
    require_extra("serve", "moestro calibrate")
    from rich.console import Console

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
