"""The parts of AMoE's experiment, each a testbed, lengths, rates and systems."""

from __future__ import annotations

from dataclasses import dataclass

from moestro.repro.amoe.beds import Bed, Popularity
from moestro.repro.amoe.systems import ASYNC, BASELINES, COLOCATED, EP, PAIRED


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Extent of the runs.

    Attributes:
        ladder: numbers of requests of the runs that keep their number constant, ascending.
        passes: tokens of each request, in the mean, before such a run is observed and while it is.
        begin_s, stop_s: observation of a run at a rate.
    """

    ladder: tuple[int, ...] = (256, 1024, 4096, 8192, 16384, 32768)
    passes: tuple[int, int] = (3, 4)
    begin_s: float = 3.0
    stop_s: float = 9.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One load of the experiment, run as a whole and kept as a file.

    Attributes:
        name: the load.
        figure: figure of the paper.
        lengths: name of the length mix.
        bed: testbed.
        rates: requests a second.
        systems: systems that serve them.
        shares: rates as shares of the highest throughput of `async`, in addition.
        is_cold: whether the system is empty at the start, as in figure 12.
        timing: extent of the runs.
        seeds: seeds of the gate, and of requests at rates. Runs with constant numbers of requests have the first.
    """

    name: str
    figure: str
    lengths: str
    bed: Bed
    rates: tuple[float, ...]
    systems: tuple[str, ...]
    shares: tuple[float, ...] = ()
    is_cold: bool = False
    timing: Timing = Timing()
    seeds: tuple[int, ...] = (0,)


RATES: dict[str, tuple[float, ...]] = {  # of the authors' scripts, the first, a middle one and the last
    "short": (100, 300, 500),
    "medium": (50, 150, 250),
    "reasonable": (25, 50, 100),
}
POPULARITIES: tuple[Popularity, ...] = ("uniform", "same", "permuted")
# Each layer has other hot experts. One panel has the same ones in all layers, to show how much that decides.
SKEWED: Popularity = "permuted"
TOP_1, TOP_2, SIXTEEN = "mixtral-8x7b-mqa-top1", "mixtral-8x7b-mqa", "mixtral-16x7b-mqa-top1"
MTFS, FLFS, FIFO, URGENT = "async:mtfs", "async:flfs", "async:fifo", "async:urgent"
RATIOS = tuple(f"async:{homes}+{8 - homes}" for homes in range(2, 7))
SPREAD_SEEDS = (1, 2, 3, 4, 5)
DECAYS, LOOKAHEADS, LOOKBACK = (0.5, 0.8, 0.95, 1.0), (0, 3, 7, 15, 31), 10
TUNED = (
    ASYNC,
    *(f"async:defrag:decay={decay:g}" for decay in DECAYS if decay != 0.8),
    *(f"async:defrag:lookahead={lookahead}" for lookahead in LOOKAHEADS if lookahead != 7),
    f"async:defrag:lookback={LOOKBACK}",
)


def panel(lengths: str, top_k: int, popularity: Popularity) -> str:
    """Name of a panel of figure 9."""
    return f"{lengths}_top{top_k}_{popularity}"


def _panel(lengths: str, top_k: int, popularity: Popularity) -> Part:
    return Part(
        name=panel(lengths, top_k, popularity),
        figure="9",
        lengths=lengths,
        bed=Bed(network=TOP_1 if top_k == 1 else TOP_2, popularity=popularity),
        rates=RATES[lengths],
        systems=(ASYNC, PAIRED if popularity == "same" else COLOCATED, *BASELINES),
    )


def _panels() -> list[Part]:
    popularities: tuple[Popularity, ...] = ("uniform", SKEWED)
    panels = [_panel(lengths, top_k, which) for lengths in RATES for top_k in (1, 2) for which in popularities]
    return [*panels, _panel("medium", 1, "same")]


def _others() -> list[Part]:
    medium = Bed(popularity=SKEWED)
    one_node = Bed(gpu="a100-40g", popularity=SKEWED)
    nodes = Bed(network=SIXTEEN, gpu="a100-40g", num_gpus=16, popularity=SKEWED)
    kernels = Bed(popularity=SKEWED, prices="kernels")
    schedulers, every = (ASYNC, MTFS, FLFS, FIFO, URGENT), (ASYNC, *BASELINES)
    rows: tuple[tuple[str, str, str, Bed, tuple[float, ...], tuple[str, ...], tuple[float, ...]], ...] = (
        ("spread", "9, seeds", "medium", medium, (250,), every, ()),
        ("kernels", "9b", "medium", kernels, (100, 250, 400, 600), every, ()),
        ("one_node", "10", "medium", one_node, RATES["medium"], every, ()),
        ("two_nodes", "10", "medium", nodes, (100, 300, 500), every, ()),
        ("schedulers_top1", "11", "medium", medium, (250,), schedulers, (0.8,)),
        ("schedulers_top2", "11", "medium", Bed(network=TOP_2, popularity=SKEWED), (), schedulers, (0.8,)),
        ("ratio_medium", "sec. 3.3", "medium", medium, (250, 400), RATIOS, ()),
        ("tuning", "sec. 3.4", "medium", medium, (), TUNED, (0.8,)),
    )
    return [
        Part(
            name="stalls", figure="4", lengths="short", rates=(100,), systems=(EP,),
            bed=Bed(network="mixtral-8x7b", gpu="a100-40g"),
        ),
        *(
            Part(
                name=f"{name}_{SKEWED}", figure=figure, lengths=lengths, bed=bed, rates=rates, systems=systems,
                shares=shares, seeds=SPREAD_SEEDS if name == "spread" else (0,),
            )
            for name, figure, lengths, bed, rates, systems, shares in rows
        ),
        Part(
            name=f"cold_{SKEWED}", figure="12", lengths="medium", bed=medium, rates=(250,), systems=(ASYNC, FLFS),
            shares=(0.8,), is_cold=True, timing=Timing(begin_s=20.0, stop_s=40.0),
        ),
    ]  # fmt: skip


WHOLE = (*_panels(), *_others())
QUICK = (
    Part(
        name=panel("medium", 1, "permuted"),
        figure="9",
        lengths="medium",
        bed=Bed(popularity="permuted"),
        rates=(100, 150),
        systems=(ASYNC, *BASELINES),
        timing=Timing(ladder=(1024, 4096), passes=(2, 1), begin_s=0.5, stop_s=1.1),
    ),
)
