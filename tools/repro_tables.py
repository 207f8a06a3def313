"""Tables of docs/ that are made from the stored runs of papers, in bench/results/repro/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from moestro.repro.amoe.findings import AmoeFindings
from moestro.repro.amoe.loads import LENGTHS
from moestro.repro.amoe.parts import WHOLE
from moestro.repro.amoe.systems import ASYNC, BASELINES, COLOCATED
from moestro.repro.papers import papers
from moestro.repro.qllm.engines import EXPERT, FCFS, FCFS_64, RUN_TO_COMPLETION
from moestro.repro.qllm.findings import QllmFindings, ls_ttft
from moestro.repro.qllm.paper import HELD_UP_TO, MEAN_FACTOR, MOST_FACTOR, TURNAROUND_FACTOR
from moestro.repro.qllm.sweep import SweepPoint, at_rates, ratios, sweep_point
from moestro.repro.results import Claim, Reproduced

RESULTS = Path(__file__).parents[1] / "bench" / "results" / "repro"
_VERDICTS = {True: "holds", False: "does not hold", None: "not judged"}
_ORDER = [False, None, True]  # of verdicts in a table
_AMOE_SYSTEMS = (ASYNC, COLOCATED, *BASELINES)
# Parts of figures 9 and 10 that compare the systems, with their names in the table.
_AMOE_NAMES = {
    "kernels_permuted": "medium, top-1, permuted, the roofline's kernels, our host",
    "one_node_permuted": "8 experts, one machine, permuted",
    "two_nodes_permuted": "16 experts, two machines, permuted",
}
_POPULARITIES = {"uniform": "even experts", "permuted": "permuted", "same": "same hot experts"}


def stored(paper: str, findings: Any = Any) -> Reproduced[Any]:
    """The stored run of a paper."""
    return msgspec.json.decode((RESULTS / f"{paper}.json").read_bytes(), type=Reproduced[findings])


def claims_of_paper(paper: str) -> str:
    """The claims of a paper beside our figures: a row for each sentence of the paper, with its loads by verdict.

    Sentences with a load on which they do not hold come first. What decides a claim is listed below the table.
    """
    claims = stored(paper).claims
    by_sentence: dict[tuple[str, str], list[Claim]] = {}
    for claim in claims:
        by_sentence.setdefault((claim.source.split(", ")[0], claim.paper), []).append(claim)
    groups = sorted(by_sentence.values(), key=lambda group: min(_ORDER.index(claim.holds) for claim in group))
    numbers: dict[str, int] = {}
    lines = [
        "| where | the paper | " + " | ".join(_VERDICTS[verdict] for verdict in _ORDER) + " |",
        "|---|---|---|---|---|",
    ]
    for group in groups:
        place, labels = _places([claim.source.split(", ") for claim in group])
        whys = list(dict.fromkeys(claim.why for claim in group))
        marks = {why: f" [{numbers.setdefault(why, len(numbers) + 1)}]" if why else "" for why in whys}
        sentence = group[0].paper + (marks[whys[0]] if len(whys) == 1 else "")
        cells = []
        for verdict in _ORDER:
            by_figures: dict[str, list[str]] = {}
            for claim, label in zip(group, labels, strict=True):
                if claim.holds is verdict:
                    figures = claim.ours + (marks[claim.why] if len(whys) > 1 else "")
                    by_figures.setdefault(figures, []).append(label)
            shown = ((", ".join(filter(None, loads)), figures) for figures, loads in by_figures.items())
            cells.append("<br>".join(f"{loads}: {figures}" if loads else figures for loads, figures in shown))
        lines.append("| " + " | ".join(_cell(text) for text in (place, sentence, *cells)) + " |")
    lines += ["", *(f"{number}. {why}" for why, number in numbers.items())]
    return "\n".join([_counts(claims), "", *lines])


def _places(sources: list[list[str]]) -> tuple[str, list[str]]:
    """What the sources of a sentence have in common, and what is each claim's own."""
    common = [part for part in sources[0] if all(part in each for each in sources)]
    return ", ".join(common), [", ".join(part for part in each if part not in common) for each in sources]


def setup_of_paper(paper: str) -> str:
    """The declared set-up of a paper: its own words, the experiment's value, and why another value was chosen."""
    [found] = [each for each in papers() if each.name == paper]
    lines = ["| what | the paper | here | why it differs |", "|---|---|---|---|"]
    for row in found.experiment(found.settings()).setup:
        words = f"{row.where}: “{row.quote}”" if row.quote else "not stated"
        lines.append("| " + " | ".join(map(_cell, (row.what, words, _shown(row.value), row.differs))) + " |")
    return "\n".join(lines)


def _shown(value: object) -> str:
    """A value in the form in which a page shows it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, set | frozenset | tuple):
        parts = sorted(map(_shown, value)) if not isinstance(value, tuple) else map(_shown, value)
        text = ", ".join(each for each in parts if each)
        return (
            f"({text})" if isinstance(value, tuple) and any(isinstance(each, int | float) for each in value) else text
        )
    return f"{value:,g}" if isinstance(value, int | float) else f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _counts(claims: list[Claim]) -> str:
    num = {verdict: sum(claim.holds is verdict for claim in claims) for verdict in _VERDICTS}
    return f"Of {len(claims)} claims {num[True]} hold, {num[False]} do not, {num[None]} are not judged."


def amoe_throughputs() -> str:
    """By part and system: the closed-loop maximum, and the most over the offered rates with its ITL."""
    findings = stored("amoe", AmoeFindings).findings
    lines = [
        "| part | offered, at most | " + " | ".join(f"`{name}`" for name in _AMOE_SYSTEMS) + " |",
        "|---|---|" + "---|" * len(_AMOE_SYSTEMS),
    ]
    for part in WHOLE:
        if part.figure not in ("9", "9b", "10"):
            continue
        most = max(run.tokens_per_s for name in _AMOE_SYSTEMS if (run := findings.capacity(part.name, name)))
        cells = [_throughput(findings, part.name, name, most) for name in _AMOE_SYSTEMS]
        offered = max(findings.rates(part.name)) * LENGTHS[part.lengths].mean_output / 1e3
        lines.append(f"| {_part_name(part.name)} | {offered:.1f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _part_name(part: str) -> str:
    if part in _AMOE_NAMES:
        return _AMOE_NAMES[part]
    lengths, top, popularity = part.split("_")
    return f"{lengths}, {top.replace('top', 'top-')}, {_POPULARITIES[popularity]}"


def _throughput(findings: AmoeFindings, part: str, system: str, most: float) -> str:
    closed, offered = findings.capacity(part, system), findings.best(part, system)
    if closed is None or offered is None:
        return ""
    capacity = f"{closed.tokens_per_s / 1e3:.1f}"
    if closed.tokens_per_s == most:
        capacity = f"**{capacity}**"
    return f"{capacity} / {offered.tokens_per_s / 1e3:.1f} ({offered.itl_ms:.0f})"


def qllm_readings() -> str:
    """By length of answers: the paper's figures under each reading of its baseline."""
    findings = stored("qllm", QllmFindings).findings
    heads = (
        "load", "QLLM holds 3 s", "run to completion: TTFT of LS, x lower", "it holds 3 s", "throughput",
        "LS turnaround, at most x lower", "continuous batching: TTFT of LS, x lower", "it holds 3 s", "throughput",
        "with as many places: TTFT of LS, x lower",
    )  # fmt: skip
    factor = f"{MEAN_FACTOR.value:g} (up to {MOST_FACTOR.value:g})"
    paper = ("the paper", f"up to {HELD_UP_TO.value:g}/s", factor, "at no rate", "comparable or slightly higher",
             f"{TURNAROUND_FACTOR.value:g}", "", "", "", "")  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", f"| {' | '.join(paper)} |"]
    for load in findings.loads:
        whole, continuous = (sweep_point(findings, load, baseline) for baseline in (RUN_TO_COMPLETION, FCFS))
        places = ratios(findings, load, (FCFS_64, EXPERT), ls_ttft)
        cells = (
            f"`{load}`, {whole.num_answer_tokens:.0f} tokens", at_rates(whole.held), _factors(whole.ttft),
            at_rates(whole.held_by_baseline), _throughput_change(whole), f"{max(whole.turnaround.values()):.1f}",
            _factors(continuous.ttft), at_rates(continuous.held_by_baseline), _throughput_change(continuous),
            _factors(places),
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _factors(by_rate: dict[float, float]) -> str:
    values = list(by_rate.values())
    return f"{sum(values) / len(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def _throughput_change(point: SweepPoint) -> str:
    shares = point.throughput.values()
    return f"{min(shares) - 1:+.0%} to {max(shares) - 1:+.0%}"
