"""From start to stop: causes shown, signals obeyed, nothing left behind."""

from __future__ import annotations

import http.client
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.running import (
    MOESTRO,
    PATIENCE_S,
    REAL,
    Running,
    complete,
    has_ended,
    open_stream,
    read_to_end,
    wait_until,
)

from moestro.cli import main

FLAGS = [
    *("host", "port", "served-model-name", "api-key", "tokenizer", "dtype", "device", "load-format", "max-model-len"),
    *("max-num-seqs", "max-num-batched-tokens", "max-num-queued-reqs", "block-size", "kv-cache-memory-bytes"),
    *("num-gpu-blocks-override", "no-enable-prefix-caching", "gate-override", "seed", "engines", "shutdown-timeout"),
    "paced-arithmetic",
]


def last_line(server: Running) -> str:
    return server.text.strip().splitlines()[-1]


def assert_nothing_is_left(server: Running, ranks) -> None:
    wait_until(lambda: all(map(has_ended, ranks)))
    assert server.left_behind() == []


def start_and_fail(command, directory) -> tuple[int, str]:
    """(exit status, last line) of a server that must not come up."""
    server = Running(command, directory, wait=False)
    try:
        code = server.process.wait(PATIENCE_S)
    finally:
        server.kill()
    assert server.left_behind() == []
    return code, last_line(server)


# --- starting


def test_the_banner_tells_what_is_served_and_its_curl_line_works(fake):
    for words in ("moestro-demo", "16,384 tokens: 4.0 sequences of the full context", "pretend 0.0", fake.url):
        assert words in fake.text
    [line] = [line for line in fake.text.splitlines() if line.strip().startswith("curl ")]
    answer = subprocess.run(line, shell=True, capture_output=True, check=True).stdout
    assert b'"object":"text_completion"' in answer


def test_a_rank_that_cannot_honour_the_settings_is_exit_2_with_its_words_last(fake_command, tmp_path):
    assert start_and_fail((*fake_command, "--seed", "1", "--engines", "2"), tmp_path) == (
        2, "moestro: seed 1 is cursed: give another --seed",
    )  # fmt: skip


def test_a_rank_that_ends_without_a_word_is_exit_1(fake_command, tmp_path):
    code, line = start_and_fail((*fake_command, "--seed", "2"), tmp_path)
    assert code == 1
    assert "engine 0: its process ended with status 7" in line


def test_a_rank_that_is_never_ready_is_exit_1_at_the_deadline(fake_command, tmp_path):
    code, line = start_and_fail((*fake_command, "--seed", "3", "--startup-timeout", "1"), tmp_path)
    assert code == 1
    assert "raise --startup-timeout" in line


def test_a_missing_tokenizer_is_exit_2_and_the_ranks_are_ended(fake_command, tmp_path):
    code, line = start_and_fail((*fake_command, "--tokenizer", "/nonexistent"), tmp_path)
    assert code == 2
    assert "there is no directory /nonexistent" in line


def start_in_here(capsys, *arguments: str) -> tuple[int, str]:
    """(exit status, last line) of a command that ends before any process is started."""
    with pytest.raises(SystemExit) as caught:
        main(["serve", *arguments])
    return caught.value.code, capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--engines", "0"), "--engines must be between 1 and 1024, got 0"),
        (("--max-num-seqs", "0"), "--max-num-seqs must be at least 1, got 0"),
        (("--block-size", "0"), "--block-size"),
        (("--route-policy", "dice"), "unknown route policy 'dice'; known: aibrix"),
        (("--host", "192.0.2.1"), "give another --host or --port"),
    ],
)
def test_an_impossible_flag_is_exit_2_with_a_remedy(capsys, demo_dir, flags, words):
    code, line = start_in_here(capsys, str(demo_dir), "--port", "0", *flags)
    assert code == 2
    assert words in line


def test_a_missing_model_is_exit_2(capsys, tmp_path):
    assert start_in_here(capsys, "./nothing/here") == (2, "moestro: there is no directory ./nothing/here")
    code, line = start_in_here(capsys, str(tmp_path))
    assert code == 2
    assert "holds no config.json" in line


def test_a_port_that_is_taken_is_known_before_anything_is_started(capsys, demo_dir):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, line = start_in_here(capsys, str(demo_dir), "--port", str(taken.getsockname()[1]))
    assert code == 2
    assert "Address already in use" in line


def test_a_model_that_cannot_be_loaded_is_exit_2_with_the_cause_last(tmp_path, demo_dir):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "unknown_kind", "architectures": ["X"]}')
    shutil.copy(demo_dir / "tokenizer.json", broken)
    code, line = start_and_fail((*REAL, str(broken)), tmp_path)
    assert code == 2
    assert "broken holds no .safetensors weights" in line


# --- stopping


def test_ctrl_c_ends_everything_with_status_0_as_sigterm_does_elsewhere(fake_command, tmp_path):
    server = Running((*fake_command, "--engines", "2"), tmp_path)
    ranks = server.ranks()
    assert len(ranks) == 2
    assert len(server.left_behind()) == 1
    assert server.stop(signal.SIGINT) == 0
    assert_nothing_is_left(server, ranks)


def catches_sigterm(server: Running) -> bool:
    """Whether the API server has read its tokenizer, during which the kernel would end it at once."""
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{server.process.pid}/status").read_text())
    return bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


def test_a_signal_while_engines_load_ends_everything(fake_command, tmp_path):
    server = Running((*fake_command, "--seed", "3"), tmp_path, wait=False)
    wait_until(lambda: "pretend" in server.text and catches_sigterm(server))
    ranks = server.ranks()
    assert server.stop() == 0
    assert_nothing_is_left(server, ranks)


def test_running_requests_finish_before_the_server_does_and_nothing_new_is_taken(fake_command, tmp_path):
    server = Running(fake_command, tmp_path)
    kept_alive = http.client.HTTPConnection(*server.address)
    kept_alive.request("GET", "/health")
    kept_alive.getresponse().read()
    connection = open_stream(server, max_tokens=400)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "stopping: 1 requests" in server.text)
    kept_alive.request("POST", "/v1/completions", b'{"prompt": "x"}', {"Content-Type": "application/json"})
    response = kept_alive.getresponse()
    assert (response.status, response.headers["Retry-After"]) == (503, "1")
    assert b"shutting_down" in response.read()
    for path, status in (("/ready", 503), ("/health", 200)):
        kept_alive.request("GET", path)
        with kept_alive.getresponse() as response:
            assert response.status == status
    kept_alive.close()
    with pytest.raises(ConnectionRefusedError):
        complete(server)
    assert b"data: [DONE]" in read_to_end(connection)
    assert server.stop() == 0


def test_requests_that_do_not_finish_in_time_hear_why(fake_command, tmp_path):
    server = Running((*fake_command, "--shutdown-timeout", "0.3"), tmp_path)
    connection = open_stream(server, max_tokens=4000)
    server.process.send_signal(signal.SIGTERM)
    answer = read_to_end(connection)
    assert b"event: error\n" in answer
    assert b"shutting_down" in answer
    assert b"[DONE]" not in answer
    assert server.stop() == 0


def test_a_second_signal_does_not_wait_and_streams_hear_why(fake_command, tmp_path):
    server = Running((*fake_command, "--shutdown-timeout", "60"), tmp_path)
    connection = open_stream(server, max_tokens=4000)
    ranks = server.ranks()
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "stopping: 1 requests" in server.text)
    assert server.stop() == 0  # well within the 60 s
    answer = read_to_end(connection)
    assert b"shutting_down" in answer  # its clients hear why all the same
    assert b"[DONE]" not in answer
    assert_nothing_is_left(server, ranks)


def test_ranks_do_not_outlive_an_api_server_that_was_killed(fake_command, tmp_path):
    server = Running(fake_command, tmp_path)
    connection = open_stream(server, max_tokens=4000)
    ranks = server.ranks()
    server.kill()
    wait_until(lambda: all(map(has_ended, ranks)))
    connection.close()


# --- the command


def test_the_api_server_and_the_command_do_not_load_torch():
    imports = "moestro.cli, moestro.server.server, moestro.config.checkpoint_directory"
    code = f"import sys, {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_version_and_help():
    version = subprocess.run([MOESTRO, "--version"], capture_output=True, check=True)
    assert version.stdout.strip()
    text = subprocess.run([*REAL, "--help-all"], capture_output=True, text=True, check=True).stdout
    for group in ("Model", "Memory", "Scheduling", "Server", "Engines"):
        assert group in text
    for flag in FLAGS:
        assert f"--{flag}" in text
