import json
from pathlib import Path

import numpy as np
import pytest

from moestro.errors import ConfigError
from moestro.workload.traces.request_record import read_vllm_run

SHARED = Path(__file__).parents[3] / "shared" / "traces" / "vllm019_qwen3_30b_a3b_dp2ep2_requests.jsonl.zst"
S = 1_000_000_000
RECORD = {
    "request_id": "a", "input_toks": 100, "output_toks": 3, "arrival_time": 1_777_144_891.0,
    "queued_ts": 50.5, "scheduled_ts": 50.75, "first_token_ts": 51.0, "last_token_ts": 52.0,
}  # fmt: skip


def write(tmp_path, *records):
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_times_count_from_the_first_requests_queueing(tmp_path):
    earlier = RECORD | {"arrival_time": 1_777_144_890.5, "queued_ts": 50.0, "output_toks": 1, "last_token_ts": 51.0}
    run = read_vllm_run(write(tmp_path, RECORD, earlier))
    assert run.rows.num_output_tokens.tolist() == [1, 3]
    assert run.rows.timestamp_ns.tolist() == [0, S // 2]
    assert run.timelines.arrival_ns.tolist() == [0, S // 2]
    assert run.scheduled_ns.tolist() == [750_000_000] * 2
    assert run.timelines.ttft_ns.tolist() == [S, S // 2]
    assert run.timelines.tpot_ns[1] == S / 2


def test_other_records_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"line 2: .*missing required field.*expected a record with input_toks"):
        read_vllm_run(write(tmp_path, RECORD, {"input_toks": 3}))
    with pytest.raises(ConfigError, match="holds no requests"):
        read_vllm_run(write(tmp_path))


def test_the_fidelity_fixture_is_read_whole():
    if not SHARED.exists():
        pytest.skip(f"needs {SHARED.name}, which is not beside this checkout")
    run = read_vllm_run(SHARED)
    assert len(run.rows) == len(run.timelines) == 300
    lines = run.timelines
    assert (lines.arrival_ns <= run.scheduled_ns).all()
    assert (run.scheduled_ns < lines.first_token_ns).all()
    assert (lines.first_token_ns <= lines.last_token_ns).all()
    assert np.nanmean(lines.tpot_ns) / 1e6 == pytest.approx(45, abs=5), "43.5 to 47.6 ms a step were published"
