"""The rank process with a network: `python -m moestro.worker.worker`."""

from __future__ import annotations

import gc

from moestro.worker.rank_process import is_standby, leave, run_process


def _main() -> int:
    # Libraries create 400,000 objects that stay. Looking for garbage among them takes a sixth of the time to load them,
    # and would later stop a loaded rank for 0.2 s at each full collection.
    gc.disable()
    from moestro.model.load import load_ahead  # noqa: PLC0415 - the collector has to be off before
    from moestro.worker.network_rank import build_network_rank, load_network_part  # noqa: PLC0415

    if is_standby():
        load_ahead()
    gc.freeze()
    gc.enable()
    return run_process(build_network_rank, load_network_part)


if __name__ == "__main__":
    leave(_main())
