"""The set-up of each paper: the experiment has the declared values, and the paper has the quoted words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moestro.repro.experiment import PaperFigure
from moestro.repro.papers import papers

SEEDS = Path(__file__).parents[3] / "shared" / "seeds"
PAPERS = {"lmetric": "lmetric.txt", "amoe": "amoe.md", "gimbal": "gimbal_v1.txt", "qllm": "qllm.txt"}
BY_NAME = {paper.name: paper for paper in papers()}
EXPERIMENTS = {name: BY_NAME[name].experiment(BY_NAME[name].settings()) for name in PAPERS}
ROWS = [(name, row) for name, experiment in EXPERIMENTS.items() for row in experiment.setup]
IDS = [f"{name}: {row.what}" for name, row in ROWS]


@pytest.mark.parametrize(("paper", "row"), ROWS, ids=IDS)
def test_the_whole_experiment_has_the_declared_value(paper, row):
    assert row.ours(EXPERIMENTS[paper]) == row.value


@pytest.mark.parametrize(("paper", "row"), ROWS, ids=IDS)
def test_a_row_has_the_paper_s_words_or_a_reason(paper, row):
    assert row.differs or (row.where and row.quote)


@pytest.mark.parametrize(("paper", "row"), [pair for pair in ROWS if pair[1].quote])
def test_the_quoted_words_stand_in_the_paper(paper, row):
    text = SEEDS / PAPERS[paper]
    if not text.exists():
        pytest.skip("the texts of the papers are not here")
    assert plain(row.quote) in plain(text.read_text())


FIGURES = [(name, figure) for name, experiment in EXPERIMENTS.items() for figure in experiment.figures]


@pytest.mark.parametrize(("paper", "figure"), FIGURES, ids=[f"{name}: {figure.what}" for name, figure in FIGURES])
def test_a_figure_is_the_one_that_the_paper_states(paper, figure):
    """A change is written without its sign, and a factor or a percentage with a digit or two."""
    assert 0 <= figure.least <= abs(figure.value)
    if not figure.quote:
        return
    shown = {f"{abs(figure.value) * unit:.{digits}f}" for unit in (1, 100) for digits in range(4)}
    assert any(number in shown for number in re.findall(r"\d+(?:\.\d+)?", figure.quote))
    text = SEEDS / ("gimbal_v2_abstract.txt" if figure.what.startswith("v2") else PAPERS[paper])
    if not text.exists():
        pytest.skip("the texts of the papers are not here")
    assert plain(figure.quote) in plain(text.read_text())


def test_a_figure_is_reached_in_the_paper_s_direction():
    change, factor = (
        PaperFigure(what="", where="", quote="", value=value, least=least)
        for value, least in ((-0.2, 0.02), (2.0, 1.8))
    )
    assert [change.is_reached(found) for found in (-0.021, -0.02, 0.021)] == [True, False, False]
    assert [factor.is_reached(found) for found in (1.81, 1.8, -1.81)] == [True, False, False]


CLAIMS = [(name, row) for name, experiment in EXPERIMENTS.items() for row in experiment.claim_rows]


@pytest.mark.parametrize(("paper", "row"), CLAIMS, ids=[f"{name}: {row.sentence[:60]}" for name, row in CLAIMS])
def test_a_claim_states_figures_of_the_paper_or_its_words(paper, row):
    """Percentages in a sentence are those of the row's figures, or of its words."""
    assert set(row.figures) <= set(EXPERIMENTS[paper].figures)
    percentages = set(re.findall(r"(\d+(?:\.\d+)?) %", row.sentence))
    stated = {f"{100 * abs(figure.value):.3g}" for figure in row.figures} | set(re.findall(r"\d+(?:\.\d+)?", row.quote))
    assert row.where == "our own goal" or percentages <= stated
    text = SEEDS / PAPERS[paper]
    if row.quote and text.exists():
        assert plain(row.quote) in plain(text.read_text())


def test_claims_of_these_papers_are_rows():
    assert {name for name, _ in CLAIMS} == set(PAPERS)
    used = {
        name: {id(figure) for paper, row in CLAIMS if paper == name for figure in row.figures} for name, _ in CLAIMS
    }
    for name, figures in used.items():
        assert figures == {id(figure) for figure in EXPERIMENTS[name].figures}


def plain(text: str) -> str:
    """Words without markup, quotation marks and line ends."""
    return re.sub(r"\s+", " ", text.replace("*", "").replace("\N{RIGHT SINGLE QUOTATION MARK}", "'"))


def test_every_paper_has_a_set_up():
    assert all(experiment.setup for experiment in EXPERIMENTS.values())
