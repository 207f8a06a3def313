"""Functions for processes on Linux: only a signal counts as a stop, and cores bind all threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.running import wait_until

from moestro.config.linux_process import cpu_limit, is_stopped


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux tells")
def test_a_process_counts_as_stopped_from_its_signal_to_the_next():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        try:
            assert not is_stopped(process.pid)
            os.kill(process.pid, signal.SIGSTOP)
            wait_until(lambda: is_stopped(process.pid))
            os.kill(process.pid, signal.SIGCONT)
            wait_until(lambda: not is_stopped(process.pid))
        finally:
            process.kill()
    assert not is_stopped(process.pid)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux binds threads")
def test_all_threads_of_a_process_and_later_ones_run_on_its_cores():
    script = (
        "import os, threading\n"
        "from pathlib import Path\n"
        "from moestro.config.linux_process import bind_to_cores\n"
        "core, end = min(os.sched_getaffinity(0)), threading.Event()\n"
        "threading.Thread(target=end.wait).start()\n"
        "assert bind_to_cores([core])\n"
        "threading.Thread(target=end.wait).start()\n"
        "found = [os.sched_getaffinity(int(task.name)) for task in Path('/proc/self/task').iterdir()]\n"
        "assert not bind_to_cores([4095])\n"
        "end.set()\n"
        "assert found == [{core}] * 3, found\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def write_groups(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("memberships", "files", "limit"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),  # in a container
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {}, None),  # the root group of a machine
        ("0::/pod/box\n", {"pod/box/cpu.max": "max 100000\n", "pod/cpu.max": "200000 100000\n"}, 2),
        (
            "3:cpu,cpuacct:/docker/abc\n2:memory:/x\n",  # the host's name for the root of what the container sees
            {"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"},
            0.5,
        ),
        ("1:cpu:/\n0::/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ("nonsense\n", {"cpu.max": "100000 100000\n"}, None),
        ("0::/\n", {"cpu.max": "\n"}, None),
    ],
)
def test_the_limit_of_cores_is_the_least_quota_of_the_groups_around_a_process(memberships, files, limit, tmp_path):
    write_groups(tmp_path, files | {"memberships": memberships})
    assert cpu_limit(tmp_path / "memberships", tmp_path) == limit


def test_without_control_groups_there_is_no_limit(tmp_path):
    assert cpu_limit(tmp_path / "absent", tmp_path) is None
