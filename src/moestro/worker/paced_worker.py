"""The rank process without a network: `python -m moestro.worker.paced_worker`. It never loads torch."""

from __future__ import annotations

from pathlib import Path

from moestro.config.launch_spec import LaunchSpec
from moestro.core.model_info import ModelInfo
from moestro.engine.rank import Rank
from moestro.worker.paced import FixedAnswers, make_paced_rank, paced_info, read_words
from moestro.worker.paced_group import build_paced_group_rank
from moestro.worker.rank_process import OnPhase, Send, leave, run_process


def _build(spec: LaunchSpec, on_phase: OnPhase, send: Send) -> tuple[Rank, ModelInfo]:
    assert spec.paced is not None, "started for a paced device"
    on_phase("price")
    words, vocab_size = read_words(spec.model.tokenizer or Path(spec.model.model))
    if spec.lock_step is not None:
        info = paced_info(spec.paced, spec.model, vocab_size, spec.lock_step.num_ranks)
        return build_paced_group_rank(spec, spec.lock_step, FixedAnswers(words), info, send), info
    info = paced_info(spec.paced, spec.model, vocab_size)
    return make_paced_rank(spec, spec.paced, FixedAnswers(words), info), info


if __name__ == "__main__":
    leave(run_process(_build))
