import numpy as np

from moestro.core.clock import Timelines


def test_latencies_of_three_tokens_and_of_one():
    lines = Timelines(*(np.array(column, np.int64) for column in ([10, 100], [15, 107], [35, 107], [3, 1])))
    assert lines.ttft_ns.tolist() == [5, 7]
    assert lines.e2e_ns.tolist() == [25, 7]
    assert lines.tpot_ns[0] == 10
    assert np.isnan(lines.tpot_ns[1]), "one token has no gap"
