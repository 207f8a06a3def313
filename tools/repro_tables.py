"""Tables of docs/ that are made from the stored runs of papers, in bench/results/repro/."""

from __future__ import annotations

import re
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from moestro.repro.amoe.loads import LENGTHS, AmoeFindings
from moestro.repro.amoe.paper import WHOLE
from moestro.repro.amoe.systems import ASYNC, BASELINES, COLOCATED
from moestro.repro.papers import papers
from moestro.repro.results import Claim, Reproduced

RESULTS = Path(__file__).parents[1] / "bench" / "results" / "repro"
_VERDICTS = {True: "holds", False: "does not hold", None: "not judged"}
_ORDER = [False, None, True]  # of verdicts in a table
_INTERVAL = re.compile(r" \([-+][\d.]+% to [-+][\d.]+%\)")
_NUMBER = re.compile(r"(?<![\w.\[-])[-+]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?(?:%|x|/s|\b)")
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
    Intervals of differences are left out; the stored run has them.
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
                    figures = _INTERVAL.sub("", claim.ours) + (marks[claim.why] if len(whys) > 1 else "")
                    by_figures.setdefault(figures, []).append(label)
            cells.append(_by_load([(", ".join(filter(None, loads)), ours) for ours, loads in by_figures.items()]))
        lines.append("| " + " | ".join(_cell(text) for text in (place, sentence, *cells)) + " |")
    lines += ["", *(f"{number}. {why}" for why, number in numbers.items())]
    return "\n".join([_counts(claims), "", *lines])


def _by_load(figures: list[tuple[str, str]]) -> str:
    """Figures by load. Those that differ by numbers alone share one line of words, with gaps for these numbers."""
    alike: dict[str, list[tuple[str, str]]] = {}
    for loads, text in figures:
        alike.setdefault(_NUMBER.sub("…", text), []).append((loads, text))
    lines = []
    for group in alike.values():
        if len(group) == 1:
            [(loads, text)] = group
            lines.append(f"{loads}: {text}" if loads else text)
            continue
        numbers = [_NUMBER.findall(text) for _, text in group]
        gaps = {at for at, found in enumerate(zip(*numbers, strict=True)) if len(set(found)) > 1}
        places = count()
        words = _NUMBER.sub(
            lambda found, places=places, gaps=gaps: "…" if next(places) in gaps else found[0], group[0][1]
        )
        lines.append(f"*{words}*")
        for (loads, _), found in zip(group, numbers, strict=True):
            lines.append(f"{loads}: {', '.join(each for at, each in enumerate(found) if at in gaps)}")
    return "<br>".join(lines)


def _places(sources: list[list[str]]) -> tuple[str, list[str]]:
    """What the sources of a sentence have in common, and what is each claim's own."""
    common = [part for part in sources[0] if all(part in each for each in sources)]
    return ", ".join(common), [", ".join(part for part in each if part not in common) for each in sources]


def setup_of_paper(paper: str) -> str:
    """The declared set-up of a paper: where it states each value, the experiment's, and why another was chosen."""
    [found] = [each for each in papers() if each.name == paper]
    lines = ["| what | the paper | here | why it differs |", "|---|---|---|---|"]
    for row in found.experiment(found.settings()).setup:
        where = row.where if row.quote else "not stated"
        lines.append("| " + " | ".join(map(_cell, (row.what, where, _shown(row.value), row.differs))) + " |")
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
