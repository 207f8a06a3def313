"""A rank without a network, over the real wire: it repeats the prompt, token by token, 2 ms a step.

A request's `priority` can ask for trouble: see `FakeRank`.
"""

from __future__ import annotations

import sys
import time

import msgspec

from moestro.core.request import FinishReason, Output, Request
from moestro.errors import ConfigError, QueueFullError
from moestro.serve.channel import Channel
from moestro.serve.launch_spec import LaunchSpec
from moestro.serve.messages import Failed, ModelInfo, Phase, Ready
from moestro.serve.rank_loop import run_rank

REFUSE, CRASH, FAIL_ONE = 98, 99, 97  # at once; after 3 tokens, the process; after 3 tokens, this request
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
)


class Stats(msgspec.Struct):
    num_running: int
    num_waiting: int = 0
    kv_usage: float = 0.0


class FakeRank:
    def __init__(self) -> None:
        self.running: dict[str, tuple[Request, int]] = {}

    def add(self, request: Request, now_ns: int) -> None:
        if request.priority == REFUSE:
            raise QueueFullError(7)
        self.running[request.request_id] = (request, 0)

    def abort(self, request_id: str, now_ns: int) -> None:
        self.running.pop(request_id, None)

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def stats(self) -> Stats:
        return Stats(len(self.running))

    def step(self, now_ns: int) -> list[Output]:
        time.sleep(0.002 if self.running else 0)
        return [self._next(request, count) for request, count in list(self.running.values())]

    def _next(self, request: Request, count: int) -> Output:
        token_id = int(request.token_array()[count % request.num_prompt_tokens])
        reason = FinishReason.LENGTH if count + 1 == request.sampling.max_tokens else None
        if token_id in request.sampling.stop_token_ids:
            reason = FinishReason.STOP
        if count == 3 and request.priority == CRASH:
            raise RuntimeError("asked to crash")
        if count == 3 and request.priority == FAIL_ONE:
            reason = FinishReason.ERROR
        self.running[request.request_id] = (request, count + 1)
        if reason is not None:
            del self.running[request.request_id]
        return Output(request_id=request.request_id, token_ids=(token_id,), finish_reason=reason)


def main() -> int:
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=LaunchSpec)
    channel = Channel(spec.address, spec.rank, sys.stdin.fileno())
    try:
        channel.send(Phase("pretend", 0.0))
        if spec.model.seed == 1:
            raise ConfigError("seed 1 is cursed: give another --seed")
        if spec.model.seed == 2:
            return 7  # without a word
        if spec.model.seed == 3:
            time.sleep(60)
        channel.send(Ready(INFO))
        run_rank(FakeRank(), channel, time.monotonic_ns)
    except Exception as error:
        channel.send(Failed(str(error), isinstance(error, ConfigError)))
        return 1
    else:
        return 0
    finally:
        channel.close()


if __name__ == "__main__":
    sys.exit(main())
