"""docs/tutorial.md: its commands run as they are written, in order, in one shell and an empty directory.

Those of `moestro` run in forks of a process that has loaded the libraries.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from pathlib import Path

from support.running import free_port
from support.shell_commands import forked_commands

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tutorial.md"


def commands() -> str:
    """All `bash` blocks of the page, end to end."""
    return "\n".join(re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL))


def with_free_ports(script: str) -> str:
    """The script with a free port in place of each port number (8000 to 8099)."""
    free = {port: str(free_port()) for port in sorted(set(re.findall(r"\b80\d\d\b", script)))}
    return re.sub(r"\b80\d\d\b", lambda found: free[found[0]], script)


def test_every_command_of_the_tutorial_runs(tmp_path, tmp_path_factory):
    script = "set -e\n" + with_free_ports(commands())
    with (
        (tmp_path / "output").open("wb") as output,
        forked_commands(tmp_path_factory.mktemp("commands")) as path,
    ):
        shell = subprocess.Popen(
            ["bash", "-c", script],
            cwd=tmp_path,
            env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            status = shell.wait(600)
        except subprocess.TimeoutExpired:
            status = None
        with contextlib.suppress(ProcessLookupError):  # the servers of a script that failed
            os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()
    logs = "".join(f"{log.name}:\n{log.read_text()}" for log in tmp_path.glob("*.log"))
    shown = (tmp_path / "output").read_text()
    assert status == 0, f"{shown}\n{logs}"
    assert shown.count("20 answered of 20") == 2
    assert "40 answered of 40" in shown
    assert "2 answered of 2, 0 errors" in shown
    assert re.search(r"^(\d+) of \1 decisions are reproduced", shown, re.MULTILINE)
    assert "Under round_robin (simulated)" in shown
    assert "Under my_policy.py:fewest_tokens (simulated)" in shown
