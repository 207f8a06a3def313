"""The rank process without a network: `python -m moestro.worker.paced_worker`. It never loads torch."""

from __future__ import annotations

from moestro.config.launch_spec import LaunchSpec
from moestro.core.request import ModelInfo
from moestro.engine.rank import Rank
from moestro.worker.paced import FixedAnswers, make_paced_rank, num_blocks_of, paced_info, read_words
from moestro.worker.paced_group import build_paced_group_rank, load_paced_part, num_part_blocks
from moestro.worker.rank_builder import OnPhase, Send
from moestro.worker.rank_process import WorkerPart, WorkerSizes, leave, run_process


def _build(spec: LaunchSpec, on_phase: OnPhase, send: Send) -> tuple[Rank, ModelInfo]:
    assert spec.paced is not None, "started for a paced device"
    on_phase("price")
    words, vocab_size = read_words(spec.model.tokenizer_directory)
    num_ep_ranks = 1 if spec.lock_step is None else spec.lock_step.num_ranks
    num_blocks = num_blocks_of(spec.paced, spec.model, num_ep_ranks)
    assert num_blocks is not None, "a table goes with the demo network"
    info = paced_info(spec.paced, spec.model, vocab_size, num_blocks)
    if spec.lock_step is not None:
        return build_paced_group_rank(spec, spec.lock_step, FixedAnswers(words), info, send), info
    return make_paced_rank(spec, spec.paced, FixedAnswers(words), info), info


def _load_part(spec: LaunchSpec, sizes: WorkerSizes, on_phase: OnPhase) -> WorkerPart:
    assert spec.paced is not None, "started for a paced device"
    on_phase("price")
    if not sizes.num_rows:
        return load_paced_part(spec, sizes, None, None)
    words, vocab_size = read_words(spec.model.tokenizer_directory)
    info = paced_info(spec.paced, spec.model, vocab_size, num_part_blocks(spec, spec.paced))
    return load_paced_part(spec, sizes, FixedAnswers(words), info)


if __name__ == "__main__":
    leave(run_process(_build, _load_part))
