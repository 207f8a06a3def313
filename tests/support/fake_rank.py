"""A rank without a network, over the real wire: it repeats the prompt, token by token, 2 ms a step or FAKE_STEP_S.

A request's `priority` can ask for trouble: see `FakeRank`.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import sys
import time

import msgspec

from moestro.config.launch_spec import STACK_DUMP, read_launch_spec
from moestro.core.load_figures import IDLE, LoadFigures
from moestro.core.request import FinishReason, ModelInfo, NewOutputs, Output, PackedLogprobs, Request, TokenLogprobs
from moestro.engine.settings import SchedulerOptions
from moestro.errors import ConfigError, QueueFullError
from moestro.wire.messages import Failed, Phase, Ready, identity_of
from moestro.worker.channel import Channel
from moestro.worker.rank_loop import run_rank

REFUSE, CRASH, FAIL_ONE = 98, 99, 97  # at once; after 3 tokens, the process; after 3 tokens, this request
# Before the first token: the process ends; the main loop stands still; a step takes 2.2 s; nothing is computed.
CRASH_AT_ONCE, HANG, SLOW, STUCK = 96, 95, 94, 93
BABBLE = 92  # sends what is no message
FAKE_STEP_S = "FAKE_STEP_S"  # variable of the environment: duration of a step in seconds
INFO = ModelInfo(
    model_id="fake",
    max_model_len=4096,
    vocab_size=4096,
    eos_token_ids=(0, 2),
    block_size=16,
    num_blocks=1024,
    num_parameters=0,
    model_type="fake",
    dtype="none",
    device="none",
    num_layers=0,
    num_experts=0,
    num_experts_per_token=0,
)


class FakeRank:
    """Runs the first `max_num_seqs` requests that came, and refuses those that make too many wait."""

    def __init__(self, limits: SchedulerOptions = SchedulerOptions()) -> None:  # noqa: B008
        self.limits = limits
        self.step_s = float(os.environ.get(FAKE_STEP_S, "0.002"))
        self.requests: dict[str, tuple[Request, int]] = {}
        self.num_queried = 0
        self.num_steps = 0
        self.babble = lambda: None

    def add(self, request: Request, now_ns: int) -> None:
        num_waiting = len(self.requests) - self.num_running
        if request.priority == REFUSE or num_waiting >= self.limits.max_num_queued_reqs:
            raise QueueFullError(num_waiting)
        self.requests[request.request_id] = (request, request.num_resumed_tokens)
        self.num_queried += request.num_prompt_tokens

    def take_given_way(self) -> list[str]:
        return []

    def abort(self, request_id: str, now_ns: int) -> None:
        self.requests.pop(request_id, None)

    @property
    def num_running(self) -> int:
        return 0 if self.is_stuck else min(len(self.requests), self.limits.max_num_seqs)

    @property
    def is_stuck(self) -> bool:
        return any(request.priority == STUCK for request, _ in self.requests.values())

    def ready_at_ns(self) -> None:
        return None

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def stats(self) -> LoadFigures:
        running = self.num_running
        waiting = len(self.requests) - running
        return msgspec.structs.replace(
            IDLE,
            num_running=running,
            num_waiting=waiting,
            kv_usage=running / 64,
            num_queried_tokens=self.num_queried,
            num_hit_tokens=self.num_queried // 2,
        )

    def begin(self, now_ns: int) -> None:
        """Nothing: `outputs` does it all."""

    def outputs(self, now_ns: int, is_wanted=None) -> NewOutputs:
        time.sleep(self.step_s if self.requests else 0)
        running = list(itertools.islice(self.requests.values(), self.num_running))
        self.num_steps += bool(running)
        for request, _ in running:
            if request.priority == CRASH_AT_ONCE:
                raise RuntimeError("ordered to crash at once")
            if request.priority == BABBLE:
                self.babble()
            if request.priority in (HANG, SLOW):
                time.sleep(600 if request.priority == HANG else 2.2)
        return NewOutputs(tuple(self._next(request, count) for request, count in running))

    def _next(self, request: Request, count: int) -> Output:
        if request.sampling.max_tokens == 0:
            del self.requests[request.request_id]
            return gained(request, (), FinishReason.LENGTH, is_first=True)
        token_id = int(request.token_array()[count % request.num_prompt_tokens])
        reason = FinishReason.LENGTH if count + 1 == request.sampling.max_tokens else None
        if token_id in request.sampling.stop_token_ids:
            reason = FinishReason.STOP
        if count == 3 and request.priority == CRASH:
            raise RuntimeError("ordered to crash")
        if count == 3 and request.priority == FAIL_ONE:
            reason = FinishReason.ERROR
        self.requests[request.request_id] = (request, count + 1)
        if reason is not None:
            del self.requests[request.request_id]
        return gained(request, (token_id,), reason, is_first=count == request.num_resumed_tokens)


def gained(request: Request, token_ids: tuple[int, ...], reason: FinishReason | None, *, is_first: bool) -> Output:
    sampling = request.sampling
    prompt = None
    if is_first and sampling.prompt_logprobs is not None:
        prompt = tuple(scored(token_id, sampling.prompt_logprobs) for token_id in request.token_array()[1:].tolist())
    return Output(
        request_id=request.request_id,
        token_ids=token_ids,
        finish_reason=reason,
        logprobs=() if sampling.logprobs is None else tuple(scored(t, sampling.logprobs) for t in token_ids),
        prompt_logprobs=None if prompt is None else PackedLogprobs.pack(prompt),
        admitted_ns=request.arrival_ns,
    )


def scored(token_id: int, num_top: int) -> TokenLogprobs:
    """A token is half as likely as the one before it, and third."""
    top = tuple(((token_id - 2 + i) % INFO.vocab_size, -0.5 * (i + 1)) for i in range(num_top))
    return TokenLogprobs(token_id, -1.5, 3, top)


def main() -> int:
    spec = read_launch_spec(sys.stdin.buffer)
    faulthandler.register(STACK_DUMP)
    channel = Channel(spec.address, identity_of(spec.rank, spec.launch), sys.stdin.fileno())
    try:
        channel.send(Phase("pretend", 0.0))
        if spec.model.seed == 1:
            raise ConfigError("seed 1 is cursed: give another --seed")
        if spec.model.seed == 2 or (spec.model.seed == 4 and spec.launch):
            return 7  # without a word
        if spec.model.seed == 3:
            time.sleep(60)
        is_exact = spec.model.kernels == "own" or spec.model.dtype == "float32"  # as far as the server can tell
        channel.send(Ready(msgspec.structs.replace(INFO, is_exact=is_exact)))
        rank = FakeRank(spec.scheduler)
        rank.babble = lambda: channel.send("babble")
        run_rank(rank, channel, time.monotonic_ns)
    except Exception as error:
        channel.send(Failed(str(error), isinstance(error, ConfigError)))
        return 1
    else:
        return 0
    finally:
        channel.close()


if __name__ == "__main__":
    sys.exit(main())
