"""What is kept of a decision, against plain lists."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from support.routers import request, router, table, view

from moestro.routing.policy_contract import Choice
from moestro.routing.router import MAX_CANDIDATES, candidates_of


@pytest.mark.parametrize("num_engines", [1, 2, MAX_CANDIDATES, MAX_CANDIDATES + 1, 300])
def test_law_the_best_are_kept_in_order_and_the_regret_is_against_the_best_other(num_engines):
    rng = random.Random(num_engines)
    for _ in range(60):
        scores = [
            rng.choice([math.inf, 1.0, 2.0, float(rng.randrange(1000)), rng.random()]) for _ in range(num_engines)
        ]
        routable = [rng.random() < 0.8 for _ in range(num_engines)]
        chosen = rng.randrange(num_engines)
        routable[chosen] = True
        hits = [16 * rng.randrange(9) for _ in range(num_engines)]
        seen = view(table(routable=routable), hits)
        kept = candidates_of(seen, Choice(chosen, scores[chosen], "", np.array(scores)))
        best = sorted((row for row in range(num_engines) if routable[row]), key=lambda row: (scores[row], row))
        wanted = best[:MAX_CANDIDATES] + [chosen] * (chosen not in best[:MAX_CANDIDATES])
        ranked = kept.ranked()
        assert kept.num == len(best)
        assert [int(kept.rows[at]) for at in ranked] == wanted
        assert [kept.score(at) for at in ranked] == [scores[row] if scores[row] < math.inf else None for row in wanted]
        assert [int(kept.hit_tokens[at]) for at in ranked] == [hits[row] for row in wanted]
        others = [scores[row] for row in best if row != chosen]
        is_finite = others and max(scores[chosen], others[0]) < math.inf
        assert kept.regret == (scores[chosen] - others[0] if is_finite else None)


@pytest.mark.parametrize("num_engines", [8, 40])
def test_a_score_that_is_no_number_hides_no_other(num_engines):
    scores = np.arange(num_engines, dtype=np.float64)
    scores[3] = math.nan
    kept = candidates_of(view(table(num_in_flight=[0] * num_engines)), Choice(1, 1.0, "", scores))
    assert len(kept.rows) == min(num_engines, MAX_CANDIDATES)
    assert kept.regret == 1.0


def test_where_nothing_is_scored_the_chosen_one_is_among_the_first():
    seen = view(table(num_in_flight=[0] * 100))
    kept = candidates_of(seen, Choice(77, 0.0, ""))
    assert kept.rows.tolist() == [*range(MAX_CANDIDATES), 77]
    assert (kept.num, kept.regret, kept.score(0)) == (100, None, None)


def test_a_decision_keeps_what_it_was_and_little_of_thousands_of_engines():
    many = router(4096, "least_loaded")
    assert many.submit(request("a"), 0).candidates is None, "none were requested"
    many.keeps_candidates = True
    decision = many.submit(request("b"), 0)
    kept = decision.candidates
    assert kept.rows.nbytes + kept.scores.nbytes + kept.hit_tokens.nbytes < 1000
    before = kept.scores.tolist()
    for i in range(100):
        many.submit(request(str(i)), 0)
    assert kept.scores.tolist() == before
