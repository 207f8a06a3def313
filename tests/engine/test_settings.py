import pytest

from moestro.engine.settings import SchedulerSettings
from moestro.errors import ConfigError

GOOD = {"num_blocks": 8, "block_size": 4, "max_model_len": 32}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"max_num_queued_reqs": -1}, "max_num_queued_reqs must be at least 1, got -1"),
        ({"max_chunk": 0}, "max_chunk must be at least 1"),
        ({"max_num_batched_tokens": 4, "max_num_seqs": 8}, "at least max_num_seqs"),
        ({"max_model_len": 33}, r"max_model_len 33 does not fit.*--kv-cache-memory-bytes"),
        ({"scheduling_policy": "lifo"}, "unknown scheduling_policy 'lifo'; known: .*fcfs"),
        ({"batch_policy": "all"}, "unknown batch_policy 'all'; known: decode_first"),
        ({"evict_policy": "first"}, "unknown evict_policy 'first'; known: last_in_order"),
        ({"scheduling_policy": "fcfs:theta=1"}, "'fcfs' has no setting 'theta'"),
        ({"batch_policy": "qllm:max_batch=0"}, "max_batch must be a whole number"),
        ({"evict_policy": "least_computed_be_first"}, "goes with scheduling_policy qllm, not with fcfs"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_with_what_is_allowed(wrong, message):
    SchedulerSettings(**GOOD)
    with pytest.raises(ConfigError, match=message):
        SchedulerSettings(**{**GOOD, **wrong})
