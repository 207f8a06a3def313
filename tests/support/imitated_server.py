"""`moestro serve` whose workers compute on the imitated accelerator: `python imitated_server.py serve ARGUMENTS`."""

from __future__ import annotations

import sys
from pathlib import Path

_WORKER = "as-worker"


def _serve() -> int:
    from support.replaced import replace_names  # noqa: PLC0415

    from moestro.cli import main  # noqa: PLC0415
    from moestro.server.processes import launch_specs  # noqa: PLC0415

    replace_names(launch_specs, WORKER=(sys.executable, __file__, _WORKER))
    return main()


def _work() -> None:
    import pytest  # noqa: PLC0415 - a server loads no torch
    from support import imitated_accelerator  # noqa: PLC0415

    from moestro.worker.network_rank import build_network_rank, load_network_part  # noqa: PLC0415
    from moestro.worker.rank_process import leave, run_process  # noqa: PLC0415

    with pytest.MonkeyPatch.context() as patch, imitated_accelerator.imitated(patch):
        leave(run_process(build_network_rank, load_network_part))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    if _WORKER in sys.argv:
        _work()
    sys.exit(_serve())
