"""A server ends after a signal, even if a thread hangs; the next server removes what a killed one left."""

from __future__ import annotations

import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from conftest import NAME
from support.running import PATIENCE_S, Running, has_ended, open_stream, read_to_end, run_command, wait_until

from moestro.server.processes.start_checks import private_directory

HANGING = (sys.executable, str(Path(__file__).parents[1] / "support" / "hanging_server.py"))


def serve_hanging(what: str, demo_dir: Path, *flags: str, grace_s: float = 1.0) -> tuple[str, ...]:
    reported = ("--served-model-name", NAME, "--shutdown-timeout", str(grace_s))
    return (*HANGING, what, "serve", str(demo_dir), *reported, *flags)


def assert_gone(server: Running, ranks) -> None:
    wait_until(lambda: all(map(has_ended, ranks)))
    assert server.left_behind() == []


@pytest.mark.parametrize(
    ("what", "number"),
    [
        ("executor", signal.SIGTERM),
        ("threads", signal.SIGINT),
        ("loop", signal.SIGTERM),
        ("stderr", signal.SIGINT),
    ],
)
def test_a_signal_ends_the_server_with_status_0_whatever_hangs(demo_dir, tmp_path, what, number):
    server = Running(serve_hanging(what, demo_dir), tmp_path)
    try:
        ranks = server.ranks()
        time.sleep(0.3)  # it hangs
        assert server.stop(number) == 0
        assert_gone(server, ranks)
        assert what == "stderr" or "ended without waiting any longer for its threads: " in server.text
    finally:
        server.kill()


def test_the_kernel_ends_a_server_whose_interpreter_hangs(demo_dir, tmp_path):
    server = Running(serve_hanging("interpreter", demo_dir), tmp_path)
    try:
        ranks = server.ranks()
        assert server.stop(signal.SIGTERM) == -signal.SIGALRM
        wait_until(lambda: all(map(has_ended, ranks)))
    finally:
        server.kill()


@pytest.mark.parametrize("what", ["executor", "loop"])
def test_a_signal_ends_the_router_likewise(tmp_path, what):
    flags = ("--engine", "http://127.0.0.1:1", "--admin-port", "0", "--shutdown-timeout", "1")
    router = Running((*HANGING, what, "route", *flags), tmp_path)
    try:
        time.sleep(0.3)
        assert router.stop(signal.SIGTERM) == 0
    finally:
        router.kill()


def test_a_second_signal_does_not_wait_for_a_loop_that_hangs(demo_dir, tmp_path):
    server = Running(serve_hanging("loop", demo_dir, grace_s=600), tmp_path)
    try:
        ranks = server.ranks()
        time.sleep(0.3)
        process = psutil.Process(server.process.pid)
        num_threads = process.num_threads()
        process.terminate()
        wait_until(lambda: process.num_threads() > num_threads)  # of two signals at once a busy process sees one
        assert server.stop(signal.SIGTERM) == 0
        assert_gone(server, ranks)
    finally:
        server.kill()


def test_a_thread_that_hangs_takes_no_time_from_the_requests_that_run(demo_dir, tmp_path):
    server = Running(serve_hanging("executor", demo_dir, grace_s=600), tmp_path)
    try:
        stream = open_stream(server, max_tokens=1500)  # 3 s, longer than the farewell
        server.process.send_signal(signal.SIGTERM)
        assert b"data: [DONE]" in read_to_end(stream)
        assert server.process.wait(PATIENCE_S) == 0  # well before the 600 s
    finally:
        server.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("what", "line"), [("tokenizer", "pretend"), ("native", "native code holds the interpreter")])
def test_a_signal_while_the_tokenizer_hangs_ends_the_start_at_once(demo_dir, tmp_path, what, line, number):
    """No handler of Python runs while native code holds the interpreter, so the kernel ends the process."""
    server = Running(serve_hanging(what, demo_dir), tmp_path, wait=False)
    try:
        wait_until(lambda: line in server.text)
        ranks = server.ranks()
        assert server.stop(number) == -number
        wait_until(lambda: all(map(has_ended, ranks)))
    finally:
        server.kill()


def test_engines_that_fail_end_the_server_with_its_cause_although_a_thread_hangs(demo_dir, tmp_path):
    server = Running(serve_hanging("threads", demo_dir, "--seed", "4"), tmp_path)
    try:
        os.kill(server.ranks()[0].pid, signal.SIGKILL)  # seed 4: no process can be started again
        assert server.process.wait(PATIENCE_S) == 1
        assert "moestro: no engine is left" in server.text
        assert server.left_behind() == []
    finally:
        server.kill()


# --- what killed servers leave


def test_the_directory_of_a_killed_server_is_removed_by_the_next_and_that_of_a_living_one_stays(fake_command, tmp_path):
    killed = Running(fake_command, tmp_path)
    [left] = killed.left_behind()
    killed.kill()
    assert killed.left_behind() == [left]
    living = Running(fake_command, tmp_path)
    try:
        [own] = living.left_behind()
        assert own != left
        last = Running(fake_command, tmp_path)
        assert len(last.left_behind()) == 2
        assert last.stop() == 0
        assert living.left_behind() == [own]
        assert living.stop() == 0
        assert living.left_behind() == []
    finally:
        living.kill()


def test_nothing_else_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "moestro-being-created").mkdir(mode=0o700)
    (tmp_path / "moestro-open").mkdir(mode=0o755)
    (tmp_path / "moestro-open" / "lock").touch()
    (tmp_path / "moestro-file").touch()
    elsewhere.mkdir(mode=0o700)
    (elsewhere / "lock").touch()
    (tmp_path / "moestro-link").symlink_to(elsewhere)
    (tmp_path / "moestro-locked-by-link").mkdir(mode=0o700)
    (tmp_path / "moestro-locked-by-link" / "lock").symlink_to(elsewhere / "lock")
    before = sorted(tmp_path.rglob("*"))
    with private_directory() as own:
        assert own.parent == tmp_path
    assert sorted(tmp_path.rglob("*")) == before


def test_servers_that_start_at_once_do_not_remove_each_other_s_directories(tmp_path, monkeypatch):
    """Each of six processes makes directories as fast as it can, and finds its own as long as it holds it."""
    code = """
from pathlib import Path
from moestro.server.processes.start_checks import private_directory
for _ in range(150):
    with private_directory() as own:
        (own / "ranks").touch()
        assert (own / "lock").exists()
"""
    (directory := tmp_path / "tmp").mkdir()
    (directory / "moestro-dead").mkdir(mode=0o700)
    (directory / "moestro-dead" / "lock").touch()
    (script := tmp_path / "script.py").write_text(code)
    monkeypatch.setenv("TMPDIR", str(directory))
    with ThreadPoolExecutor(6) as pool:
        ended = list(pool.map(lambda _: run_command([sys.executable, script]), range(6)))
    assert [(each.returncode, each.stderr) for each in ended] == [(0, "")] * 6
    assert list(directory.iterdir()) == []
