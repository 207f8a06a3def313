"""AMoE's set-up (arXiv 2505.08944) as a table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moestro.repro.amoe.loads import LENGTHS, AmoeFindings, fresh, open_load
from moestro.repro.amoe.systems import ASYNC, BASELINES, COLOCATED, EP, PAIRED, Bed, Popularity, build
from moestro.repro.experiment import PaperFigure, PartsExperiment, SetupRow

# The parts of AMoE's experiment, each a testbed, lengths, rates and systems.


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
        overload: a last rate, as a multiple of the highest throughput of all systems; 0 means none.
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
    overload: float = 0.0
    is_cold: bool = False
    timing: Timing = Timing()
    seeds: tuple[int, ...] = (0,)


RATES: dict[str, tuple[float, ...]] = {  # of the authors' scripts, the first, a middle one and the last
    "short": (100, 300, 500),
    "medium": (50, 150, 250),
    "reasonable": (25, 50, 100),
}
_OVERLOAD = 1.1  # where the rates of the paper end below what most systems can do
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
        overload=_OVERLOAD,
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
                shares=shares, overload=_OVERLOAD if figure in ("9b", "10") else 0.0,
                seeds=SPREAD_SEEDS if name == "spread" else (0,),
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


_Experiment = PartsExperiment[AmoeFindings, Part]

_NUM_DRAWN = 20_000  # requests from which ranges are read; each length of the widest range is drawn 50 times
_Range = tuple[int, int]


def _ranges(lengths: str) -> tuple[_Range, _Range]:
    """Least and most tokens of the prompts and of the answers of drawn requests."""
    prompt, output = fresh(LENGTHS[lengths], _NUM_DRAWN, np.random.default_rng(0))
    return (int(prompt.min()), int(prompt.max())), (int(output.min()), int(output.max()))


def _variation_of_gaps(_: _Experiment) -> float:
    """Coefficient of variation of the times between arrivals; 1 for a Poisson process."""
    gaps = np.diff(open_load(LENGTHS["medium"], _NUM_DRAWN, 1.0, 0, 0).offsets_ns)
    return round(float(gaps.std() / gaps.mean()), 1)


def _paper_panels(experiment: _Experiment) -> list[Part]:
    return [part for part in experiment.parts.values() if part.figure == "9"]


def _testbed(experiment: _Experiment) -> tuple[str, int, int]:
    [bed] = {(part.bed.gpu, part.bed.num_gpus, part.bed.gpus_per_machine) for part in _paper_panels(experiment)}
    return bed


def _division(experiment: _Experiment) -> tuple[int, int]:
    """GPUs with attention and GPUs with experts."""
    part, lengths = _paper_panels(experiment)[0], LENGTHS["medium"]
    built = build(ASYNC, part.bed, (lengths.mean_context, lengths.longest), 0)
    return built.num_seats, len(built.busy_ns()) - built.num_seats


def _kv_heads(experiment: _Experiment) -> set[int]:
    return {part.bed.shape.attention.num_kv_heads for part in _paper_panels(experiment)}


def _load(experiment: _Experiment, name: str) -> tuple[str, tuple[float, ...], tuple[float, ...]]:
    """Length mix of a part, its rates, and its shares of the highest throughput."""
    part = experiment.parts[name]
    return part.lengths, part.rates, part.shares


def _two_machines(experiment: _Experiment) -> tuple[str, int, int, int | None, int | None]:
    bed = experiment.parts[f"two_nodes_{SKEWED}"].bed
    experts = bed.shape.experts
    assert experts is not None, "AMoE runs Mixture-of-Experts networks"
    return bed.gpu, bed.num_gpus, bed.gpus_per_machine, experts.num_experts, experts.top_k


SETUP = (
    *(
        SetupRow(
            what=f"tokens of prompts and of answers, {name}",
            where="section 5, Workloads",
            quote=f"input [{prompt[0]}, {prompt[1]}], output [{output[0]}, {output[1]}]",
            value=(prompt, output),
            ours=lambda _, name=name: _ranges(name),  # type: ignore[misc]
        )
        for name, prompt, output in (
            ("short", (30, 70), (70, 130)),
            ("medium", (50, 150), (50, 250)),
            ("reasonable", (100, 300), (100, 500)),
        )
    ),
    SetupRow(
        what="arrivals: coefficient of variation of the gaps",
        where="section 5, Workloads",
        quote="we generate new requests through a Poisson arrival process with a given rate",
        value=1.0,
        ours=_variation_of_gaps,
    ),
    SetupRow(
        what="GPU, GPUs, and GPUs of a machine",
        where="section 5.1",
        quote="using Mixtral 8x7B with 8x A100 80GB GPUs on a single host",
        value=("a100-80g", 8, 8),
        ours=_testbed,
    ),
    SetupRow(
        what="GPUs with attention and with experts",
        where="section 5.1",
        quote="disaggregates attention layers to 4 GPUs with DP and uses the other 4 GPUs for expert layers with EP",
        value=(4, 4),
        ours=_division,
    ),
    SetupRow(
        what="heads of keys and values",
        where="section 5",
        quote="from Grouped-Query Attention (GQA) [5] to Multi-Query Attention (MQA)",
        value={1},
        ours=_kv_heads,
    ),
    SetupRow(
        what="popularities of experts",
        where="section 5",
        quote="fitted it to an exponential distribution",
        value={"uniform", "same", "permuted"},
        ours=lambda experiment: {part.bed.popularity for part in _paper_panels(experiment)},
        differs="the paper prints no rate and does not state whether layers have the same hot experts",
    ),
    SetupRow(
        what="two machines: GPU, GPUs, GPUs of a machine, experts, top-k",
        where="section 5.2, Table 2",
        quote="increasing the number of experts of Mixtral 8x7B to 16 and using top 1 routing",
        value=("a100-40g", 16, 8, 16, 1),
        ours=_two_machines,
    ),
    SetupRow(
        what="Figure 4: lengths, requests a second",
        where="Fig. 4",
        quote="with databricks-dolly-15k dataset at 100 req/s input rate",
        value=("short", (100,), ()),
        ours=lambda experiment: _load(experiment, "stalls"),
        differs="Dolly's lengths are not printed",
    ),
    SetupRow(
        what="Figure 11: lengths, requests a second, and the share of the highest throughput",
        where="Fig. 11",
        quote="Compare different schedule policy at 80% throughput. Using MQA, medium length",
        value=("medium", (250,), (0.8,)),
        ours=lambda experiment: _load(experiment, f"schedulers_top1_{SKEWED}"),
    ),
    SetupRow(
        what="Figure 12: lengths, requests a second",
        where="Fig. 12",
        quote="Request input and output rate for FLFS at input rate 250 under MQA, top-1",
        value=("medium", (250,), (0.8,)),
        ours=lambda experiment: _load(experiment, f"cold_{SKEWED}"),
    ),
)

_CLOSE = 0.9  # a factor counts as reached beyond this share of it: it is read off a plot
_GAINS_QUOTE = "2.7x, 2.3x, and 2.0x for short, medium, and reasonable workloads correspondingly"
GAINS = {
    lengths: PaperFigure(
        what=f"throughput over SGLang's, top-1, {lengths}",
        where="section 5.1, Fig. 9",
        quote=_GAINS_QUOTE,
        value=factor,
        least=_CLOSE * factor,
    )
    for lengths, factor in (("short", 2.7), ("medium", 2.3), ("reasonable", 2.0))
}
STALLS = PaperFigure(
    what="stall of the idlest GPU with expert parallelism",
    where="section 2.1, Fig. 4",
    quote="sometimes accounting up to 70%",
    value=0.7,
    least=_CLOSE * 0.7,
)
LINEAR_BATCH = PaperFigure(
    what="throughput of an expert with 128 rows over that with one",
    where="Fig. 3",
    quote="",
    value=128.0,
    least=_CLOSE * 128,
)
TWO_MACHINES = PaperFigure(
    what="throughput over SGLang's with 16 experts on 16 GPUs",
    where="section 5.2, Fig. 10",
    quote="AMoE can achieve 3x throughput improvement with a comparable ITL",
    value=3.0,
    least=_CLOSE * 3,
)
SCALING = PaperFigure(
    what="throughput with two machines over that with one",
    where="section 5.2, Fig. 10",
    quote="eventually achieving 1.92x improvement",
    value=1.92,
    least=_CLOSE * 1.92,
)
FIGURES = (*GAINS.values(), STALLS, LINEAR_BATCH, TWO_MACHINES, SCALING)
