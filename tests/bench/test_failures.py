"""`bench/robustness/failures.py`: its judgement of answers, its gaps and rates, and one kill from end to end."""

from __future__ import annotations

import importlib.util
import itertools
import random
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "bench" / "robustness" / "failures.py"


def load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


completions = load_module(ROOT / "bench" / "shared" / "completions.py")
report = load_module(SCRIPT.with_name("failures_report.py"))
# The second token is a near-tie of "b" and "bc".
CALM = report.Calm("abde", [0, 1, 2, 3], [1.0, 1e-6, 1.0, 1.0])


def answer(text: str, end: str = "answered whole", num_tokens: int = completions.TOKENS) -> object:
    return completions.Answer(end, text, num_tokens)


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        (answer("abde"), "equal"),
        (answer("axde"), "near_ties"),
        (answer("abcd"), "near_ties"),
        (answer("abdx"), "differing"),
        (answer("abd"), "differing"),
        (answer("abde", num_tokens=completions.TOKENS + 1), "doubled"),
        (answer("abde", num_tokens=completions.TOKENS - 1), "lost"),
        (answer("abde", end="error event after it had begun"), "lost"),
    ],
)
def test_an_answer_is_judged_by_the_calm_one(found, kind):
    assert report.judge(found, CALM) == kind


def test_a_sampled_answer_has_no_near_tie():
    assert report.judge(answer("axde"), report.Calm("abde", [], [])) == "sampled_differing"


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_gap_contains_the_moment_or_follows_it(seed):
    rng = random.Random(seed)
    times = sorted(rng.uniform(0, 10) for _ in range(12))
    since, until = sorted(rng.uniform(0, 10) for _ in range(2))
    found = completions.Answer(chunks=[(at, i) for i, at in enumerate(times)]).longest_gap_s(since, until)
    past, coming = [at for at in times if at <= since], [at for at in times if at > since]
    inside = [at for at in coming if at <= until]
    expected = [after - before for before, after in itertools.pairwise(inside)]
    expected += [coming[0] - past[-1]] if past and coming else []
    assert found == max(expected, default=0.0)


@pytest.mark.parametrize("seed", range(5))
def test_a_histogram_counts_every_token_of_its_bins_once(seed):
    tokens = np.sort(np.random.default_rng(seed).uniform(-1, 6, 200))
    rates = report.histogram(tokens, 0.0, 5.0, 0.5)
    expected = [sum(i * 0.5 <= at < (i + 1) * 0.5 for at in tokens) / 0.5 for i in range(10)]
    assert rates == pytest.approx(expected, abs=0.05)
    assert report.rate(tokens, 0.0, 5.0) == pytest.approx(sum(expected) / 10, abs=0.05)
