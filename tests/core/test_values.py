import msgspec
import numpy as np
import pytest

from moestro.core.request import Request, SamplingParams, ServiceClass, TokenLogprobs
from moestro.core.work import StepResult


def test_a_request_survives_the_wire():
    request = Request(
        request_id="r",
        num_prompt_tokens=2,
        sampling=SamplingParams(seed=2**64 - 1, stop_token_ids=(1, 2), logit_bias=((3, -1.5),), min_p=0.5),
        service_class=ServiceClass.BE,
        arrival_ns=5,
        token_ids=np.array([3, 4], np.int32).tobytes(),
    )
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Request)
    assert again == request
    assert again.token_array().tolist() == [3, 4]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_prompt_tokens": 0}, "empty prompt"),
        ({"token_ids": b"123"}, "holds 3 bytes"),
        ({"resumed_token_ids": b"123456"}, "holds 6 bytes"),
        ({"resumed_token_ids": bytes(4 * 16)}, "16 resumed tokens leave none of 16"),
        ({"block_hashes": b"short"}, "block_hashes must be a multiple of 16 bytes, got 5"),
    ],
)
def test_an_impossible_request_is_refused_at_birth(wrong, message):
    fields = {"request_id": "r", "num_prompt_tokens": 1, "sampling": SamplingParams(), "arrival_ns": 0, **wrong}
    with pytest.raises(ValueError, match=message):
        Request(**fields)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": -1},
        {"min_tokens": 17},
        {"min_tokens": -1},
        {"repetition_penalty": 0},
        {"seed": -1},
        {"seed": 2**64},
    ],
)
def test_impossible_sampling_is_refused_at_birth(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_selecting_rows_of_a_result_takes_what_belongs_to_them():
    entry = TokenLogprobs(1, -0.5, 1)
    result = StepResult(
        np.array([4, 5, 6], np.int32),
        np.array([7, 8, 9], np.int32),
        logprobs={0: entry, 2: entry},
        block_hashes={1: b"h"},
    )
    chosen = result.select(np.array([1, 2]))
    assert chosen.slot.tolist() == [5, 6]
    assert chosen.token_ids.tolist() == [8, 9]
    assert chosen.logprobs == {1: entry}
    assert chosen.block_hashes == {0: b"h"}
