"""AMoE's set-up (arXiv 2505.08944) as a table."""

from __future__ import annotations

import numpy as np

from moestro.repro.amoe.findings import AmoeFindings
from moestro.repro.amoe.loads import LENGTHS, fresh, open_load
from moestro.repro.amoe.parts import SKEWED, Part
from moestro.repro.amoe.systems import ASYNC, build
from moestro.repro.experiment import PartsExperiment
from moestro.repro.paper_setup import PaperFigure, SetupRow

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


def _panels(experiment: _Experiment) -> list[Part]:
    return [part for part in experiment.parts.values() if part.figure == "9"]


def _testbed(experiment: _Experiment) -> tuple[str, int, int]:
    [bed] = {(part.bed.gpu, part.bed.num_gpus, part.bed.gpus_per_machine) for part in _panels(experiment)}
    return bed


def _division(experiment: _Experiment) -> tuple[int, int]:
    """GPUs with attention and GPUs with experts."""
    part, lengths = _panels(experiment)[0], LENGTHS["medium"]
    built = build(ASYNC, part.bed, (lengths.mean_context, lengths.longest), 0)
    return built.num_seats, len(built.busy_ns()) - built.num_seats


def _kv_heads(experiment: _Experiment) -> set[int]:
    return {part.bed.shape.attention.num_kv_heads for part in _panels(experiment)}


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
        ours=lambda experiment: {part.bed.popularity for part in _panels(experiment)},
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
