"""The command itself against the real server."""

from __future__ import annotations

import json

from support.running import MOESTRO, run_command


def test_bench_measures_the_real_server(server, tmp_path):
    result = tmp_path / "result.json"
    command = [MOESTRO, "bench", "--base-url", server.url, "--num-prompts", "6", "--request-rate", "20"]
    sizes = ["--random-input-len", "24", "--random-output-len", "4", "--random-prefix-len", "32", "--num-warmups", "1"]
    goals = ["--goodput", "ttft:60000", "e2e:60000", "--json", str(result), "--plot", str(tmp_path / "plot.png")]
    done = run_command([*command, *sizes, *goals])
    assert done.stderr == "", "no bar without a terminal"
    assert "6 answered of 6" in done.stdout
    assert "TTFT" in done.stdout
    saved = json.loads(result.read_text())
    report = saved["report"]
    assert saved["conditions"]["kind"] == "measured"
    assert report["num_wrong_length"] == 0
    assert report["num_input_tokens"] == 6 * 56
    assert report["num_output_tokens"] == 6 * 4
    assert report["goodput"]["num_met"] == 6
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_bench_says_what_to_do_and_exits_with_2_when_settings_are_impossible():
    done = run_command([MOESTRO, "bench", "--request-rate", "0"])
    assert (done.returncode, done.stderr) == (2, "moestro: --request-rate must be above 0, got 0\n")
