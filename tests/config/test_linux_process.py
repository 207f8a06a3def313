"""`moestro.config.linux_process.is_stopped`: only a signal counts as a stop."""

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
