"""Law: a scheduler whose decodes go on in runs makes the plans and the state of one that looks anew at each step."""

from __future__ import annotations

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import num_examples
from support.fake_device import VOCAB_SIZE, make_request
from support.plain_grammar import backend

from moestro.core.hashing import hash_blocks, split_hashes
from moestro.core.load_figures import IDLE
from moestro.core.request import Output, ServiceClass, TokenLogprobs
from moestro.core.views import BatchLimits, BatchView
from moestro.core.work import Plan, StepResult, Units
from moestro.engine.scheduler import Scheduler
from moestro.engine.settings import SchedulerSettings
from moestro.engine.steps import StepOutput, outputs_of
from moestro.wire.messages import Outputs, decode_from_rank, encode

BLOCK_SIZE, LONGEST, NUM_REQUESTS = 4, 60, 10
COLUMNS = [name for name in Units.__struct_fields__ if name not in {"block_tables", "edits"}]


def random_request(rng: np.random.Generator, i: int):
    """Mostly plain requests with long answers, of which some want what ends a run or keeps it from beginning."""
    wishes = [
        {},
        {"prompt_logprobs": 0},
        {"logprobs": 1},
        {"repetition_penalty": 1.3},
        {"stop_token_ids": tuple(rng.integers(0, VOCAB_SIZE, 3).tolist())},
        {"max_tokens": 0},
    ]
    wish = {"max_tokens": int(rng.integers(1, 40)), **wishes[rng.choice(6, p=[0.5, 0.05, 0.1, 0.1, 0.2, 0.05])]}
    tokens = rng.integers(0, 2, rng.integers(1, LONGEST - 40))  # of two tokens, so that prompts share blocks
    request = make_request(f"r{i}", tokens, block_size=BLOCK_SIZE, arrival_ns=i, **wish)
    return msgspec.structs.replace(request, service_class=ServiceClass("be" if rng.random() < 0.03 else "ls"))


def answer(plan: Plan, seed: int) -> StepResult:
    """Draw tokens, log probabilities and failures, the same for both schedulers."""
    units, rng = plan.units, np.random.default_rng((seed, plan.step))
    token_ids = np.where(units.logits & 1, rng.integers(0, VOCAB_SIZE, len(units)), -1).astype(np.int32)
    asks = units.sampling["num_logprobs"] >= 0
    return StepResult(
        units.slot,
        token_ids,
        non_finite=np.array([0]) if rng.random() < 0.01 else None,
        logprobs={int(i): TokenLogprobs(int(token_ids[i]), 0.0, 1) for i in np.flatnonzero(asks & (units.logits & 1))},
        prompt_logprobs={
            int(i): (TokenLogprobs(0, 0.0, 1),) * int(units.num_tokens[i]) for i in np.flatnonzero(units.logits & 2)
        },
    )


def pieces(result: StepResult, rng: np.random.Generator) -> list[StepResult]:
    """The result, seldom in two parts."""
    if rng.random() < 0.9:
        return [result]
    rows = np.split(np.arange(len(result.slot)), [rng.integers(len(result.slot))])
    return [result.select(part) for part in rows if len(part)]


def columns_of(plan: Plan, scheduler: Scheduler) -> list:
    """All that a device reads of a plan; of a block table, the blocks that the sequence holds."""
    units = plan.units
    held = [len(scheduler.table.at(slot).blocks) for slot in units.slot.tolist()]
    tables = [row[:num].tolist() for row, num in zip(units.block_tables, held, strict=True)]
    edits = None if units.edits is None else [units.edits.counted.tolist(), units.edits.num_generated.tolist()]
    values = [getattr(units, name) for name in COLUMNS]
    return [plan.step, tables, edits, *(None if value is None else plain(value) for value in values)]


def plain(column: np.ndarray) -> tuple:
    """A column as lists, which can be compared; a field may be an array itself."""
    fields = [column] if column.dtype.names is None else [column[name] for name in column.dtype.names]
    return column.dtype, [field.tolist() for field in fields]


def rows_of(output: StepOutput) -> list:
    names = [sequence.request.request_id for sequence in output.sequences]
    reasons = list(output.finish_reasons.items())
    return [names, output.token_ids, reasons, output.logprobs, output.prompt_logprobs]


def received(output: StepOutput) -> list[Output]:
    """Return what the API server reads. Figures of the prompt come with the first output, and may lack later."""
    message = decode_from_rank(encode(Outputs(outputs_of(output), IDLE)))
    return [msgspec.structs.replace(each, num_cached_tokens=0, admitted_ns=0) for each in message.outputs]


def state_of(scheduler: Scheduler) -> list:
    """Everything on which a later decision could depend."""
    table, pool = scheduler.table, scheduler.pool
    running = table.running.tolist()
    return [
        running,
        table.growth[:, running].tolist(),
        table.num_in_flight[running].tolist(),
        table.num_units_in_flight,
        [(table.at(slot).blocks, table.at(slot).hashes) for slot in running],
        [table.block_table[slot, : len(table.at(slot).blocks)].tolist() for slot in running],
        [table.token_ids[slot, : table.num_tokens[slot]].tolist() for slot in running],
        (list(pool._blank), pool.cached(), list(pool._ref_count), list(pool._hash_of)),
        [sequence.serial for sequence in scheduler.waiting.in_order(0)],
        scheduler.counts,
    ]


def check_names(scheduler: Scheduler) -> None:
    """Blocks have the names that `hash_blocks` gives to the sequence's tokens, and all full ones have one."""
    table, pool = scheduler.table, scheduler.pool
    for slot in table.running.tolist():
        sequence = table.at(slot)
        known = table.token_ids[slot, : table.num_tokens[slot]]
        names = split_hashes(hash_blocks(sequence.request.hash_key, known, BLOCK_SIZE))
        assert sequence.hashes == names[: len(sequence.hashes)]
        assert len(sequence.hashes) >= table.num_computed[slot] // BLOCK_SIZE
        given = [pool._hash_of[block] for block in sequence.blocks]
        assert all(name in {None, *names[at : at + 1]} for at, name in enumerate(given))


class Twins:
    """Two schedulers with one history, the second of which never begins a run."""

    def __init__(self, settings: SchedulerSettings, seed: int) -> None:
        self.schedulers = (Scheduler(settings), Scheduler(settings))
        self.schedulers[1].decode_run.look_at = lambda units: None
        for each in self.schedulers:
            each.use_grammars(backend(VOCAB_SIZE))
        self.seed, self.num_runs, self.num_bare = seed, 0, 0

    def step(self, now_ns: int, rng: np.random.Generator, names: list[str]) -> None:
        plans = [each.schedule(now_ns) for each in self.schedulers]
        assert (plans[0] is None) == (plans[1] is None)
        victim = names[rng.integers(len(names))] if names and rng.random() < 0.03 else None
        if victim is not None and rng.random() < 0.5:
            assert len({each.abort(victim, now_ns) for each in self.schedulers}) == 1
            victim = None
        if plans[0] is not None:
            seen = [columns_of(plan, each) for plan, each in zip(plans, self.schedulers, strict=True)]
            assert seen[0] == seen[1]
            self.num_runs += self.schedulers[0].decode_run.num_known is not None
            for piece in pieces(answer(plans[0], self.seed), rng):
                outputs = [each.update(piece, now_ns) for each in self.schedulers]
                assert rows_of(outputs[0]) == rows_of(outputs[1])
                assert received(outputs[0]) == received(outputs[1])
                assert sum(len(each.logprobs) for each in received(outputs[0])) == len(outputs[0].logprobs)
                assert sum(len(each.logprobs) for each in received(outputs[0])) == len(outputs[0].logprobs)
                self.num_bare += not outputs_of(outputs[0]).others
        if victim is not None:
            assert len({each.abort(victim, now_ns) for each in self.schedulers}) == 1
        self.schedulers[0].check()
        check_names(self.schedulers[0])
        states = [state_of(each) for each in self.schedulers]
        assert states[0] == states[1]
        known = self.schedulers[0].decode_run.num_known
        table = self.schedulers[0].table
        assert known is None or known == table.num_tokens[table.running].sum()


def run_twins(seed: int, batch: str = "decode_first", **bounds: int | None) -> Twins:
    """Serve random requests to their ends, or for 400 steps."""
    rng = np.random.default_rng(seed)
    twins = Twins(SchedulerSettings(block_size=BLOCK_SIZE, max_model_len=LONGEST, batch_policy=batch, **bounds), seed)
    arriving = [random_request(rng, i) for i in range(NUM_REQUESTS)]
    names = [request.request_id for request in arriving]
    for now_ns in range(400):
        while arriving and rng.random() < 0.1:
            request = arriving.pop()
            for each in twins.schedulers:
                each.add(request)
        twins.step(now_ns, rng, names)
        if not arriving and not twins.schedulers[0].has_work:
            break
    return twins


@settings(max_examples=num_examples(25, thorough=60))
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(20, 80),
    max_num_seqs=st.integers(1, 8),
    budget=st.integers(8, 40),
    max_chunk=st.sampled_from([None, 3]),
    batch=st.sampled_from(["decode_first", "prefill_first", "run_to_completion", "qllm"]),
    caching=st.booleans(),
)
def test_runs_change_neither_plans_nor_outputs_nor_state(
    seed, num_blocks, max_num_seqs, budget, max_chunk, batch, caching
):
    run_twins(
        seed,
        batch,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_chunk=max_chunk,
        enable_prefix_caching=caching,
    )


def test_a_prompt_of_whole_blocks_whose_last_token_is_a_chunk_of_its_own():
    """That token is in a run, and fills a block whose name is known since the request arrived."""
    twins = Twins(SchedulerSettings(num_blocks=20, block_size=BLOCK_SIZE, max_model_len=LONGEST,
                                    max_num_seqs=1, max_num_batched_tokens=3 * BLOCK_SIZE - 1), 0)  # fmt: skip
    request = make_request("r", np.arange(3 * BLOCK_SIZE), block_size=BLOCK_SIZE, max_tokens=2 * BLOCK_SIZE)
    for each in twins.schedulers:
        each.add(request)
    rng = np.random.default_rng(0)
    while twins.schedulers[0].has_work:
        twins.step(0, rng, [])
    assert twins.num_runs
    assert len(twins.schedulers[0].pool.cached()) == 4


def test_most_decodes_of_a_plain_history_are_in_runs():
    """Else the law would hold for want of runs."""
    twins = [run_twins(seed, num_blocks=80, max_num_seqs=8, max_num_batched_tokens=40) for seed in range(10)]
    assert sum(each.num_runs for each in twins) > 200
    assert sum(each.num_bare for each in twins) > 200


def test_a_last_chunk_of_one_token_that_ends_a_block_is_cached_under_the_name_that_it_has():
    """Such a chunk looks like a decode, and the hash of its block is known from the prompt."""
    twins = Twins(SchedulerSettings(block_size=BLOCK_SIZE, max_model_len=LONGEST, num_blocks=40, max_num_seqs=2,
                                    max_num_batched_tokens=7), seed=0)  # fmt: skip
    for each in twins.schedulers:
        each.add(make_request("r0", range(8), block_size=BLOCK_SIZE, max_tokens=9))
    for now_ns in range(9):
        twins.step(now_ns, np.random.default_rng(0), [])
    assert twins.num_runs


class OfFirstClass:
    """Plans latency-sensitive sequences, and best-effort ones only where there are no others."""

    def room(self, view: BatchView, limits: BatchLimits) -> int:
        return limits.token_budget

    def plan(self, view: BatchView, limits: BatchLimits) -> np.ndarray:
        best = view.service_class.min()
        return np.where(view.service_class == best, view.num_left, 0).astype(np.int32)


def test_a_promotion_counts_in_the_next_step():
    scheduler = Scheduler(SchedulerSettings(num_blocks=40, block_size=4, max_model_len=60, scheduling_policy="qllm"))
    scheduler.batch_policy = OfFirstClass()
    promoted_ns = scheduler.views._promotes_after_ns
    for i in range(2):
        request = make_request(f"r{i}", [1, 2, 3], arrival_ns=i * 1000, max_tokens=30)
        scheduler.add(msgspec.structs.replace(request, service_class=ServiceClass.BE))
    for _ in range(5):
        plan = scheduler.schedule(promoted_ns - 1)
        assert len(plan.units) == 2
        scheduler.update(answer(plan, 0), promoted_ns - 1)
    assert len(scheduler.schedule(promoted_ns).units) == 1
