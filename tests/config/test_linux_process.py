"""Functions for processes on Linux: only a signal counts as a stop, and cores bind all threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.running import wait_until

from moestro.config.linux_process import is_stopped


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
