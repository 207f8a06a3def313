"""AMoE's Algorithm 1 against a twin that follows the paper line by line."""

from __future__ import annotations

import numpy as np
import pytest
from support.queue_tables import ATTENTION_WORKER, COLOCATED, EXPERT_WORKER, KINDS, queues, random_table

from moestro.core.views import ATTENTION
from moestro.errors import ConfigError
from moestro.flow.policies.defrag import Defrag
from moestro.flow.registry import make_step_policy

ROUNDS = 300
SIZES = [(7, 0.8), (0, 0.8), (1, 1.0), (3, 0.5), (12, 0.95)]


def algorithm_1(Q, can_run, K, delta, history=None):
    """Algorithm 1 of AMoE, section 3.4, with its names; `history`: mean tokens of each layer, as in its code."""
    N_B, N_E = len(Q), len(Q[0])
    Scores = [[0.0] * N_E for _ in range(N_B)]
    for b in range(N_B):
        LScore = 0.0
        for k in range(1, K + 1):
            b_ahead = (b + k) % N_B
            TotalTokens = 0
            for e in range(N_E):
                TotalTokens += Q[b_ahead][e]
            if history is not None:
                TotalTokens += history[b_ahead]
            LScore = LScore + (TotalTokens / N_E) * delta**k
        for e in range(N_E):
            if can_run[b][e]:
                Scores[b][e] = LScore + Q[b][e]
    best = None
    for b in range(N_B):
        for e in range(N_E):
            if can_run[b][e] and (best is None or Scores[b][e] > Scores[best[0]][best[1]]):
                best = (b, e)
    return best


def by_stages(A, E_mean, Q, can_run, K, delta):
    """The rule of a device with both kinds: each stage ahead counts at its distance in layers."""
    num_layers = len(A) - 1
    best, best_score = None, -1.0
    for layer in range(num_layers + 1):
        for group in range(len(Q[0])):
            if not can_run[layer][group]:
                continue
            score, is_attention = float(Q[layer][group]), group == ATTENTION
            for k in range(1, K + 1):
                score += A[(layer + k) % (num_layers + 1)] * delta ** (k if is_attention else k - 0.5)
                if is_attention:
                    score += E_mean[(layer + k - 1) % (num_layers + 1)] * delta ** (k - 0.5)
                else:
                    score += E_mean[(layer + k) % num_layers] * delta**k
            if score > best_score + 1e-9:
                best, best_score = (layer, group), score
    return best


def split(view, kind):
    """(Q, can_run) of the queues that one of AMoE's two kinds of worker has."""
    columns = slice(0, 1) if kind == ATTENTION_WORKER else slice(1, None)
    last = None if kind == ATTENTION_WORKER else -1
    chosen = view.n.sum(axis=0)[:last, columns], view.runnable.any(axis=0)[:last, columns]
    return tuple(each.tolist() for each in chosen)


@pytest.mark.parametrize("kind", [ATTENTION_WORKER, EXPERT_WORKER])
@pytest.mark.parametrize(("K", "delta"), SIZES)
def test_it_chooses_what_algorithm_1_chooses(kind, K, delta):
    rng, policy = np.random.default_rng(0), Defrag(lookahead=K, decay=delta)
    for _ in range(ROUNDS):
        view = random_table(rng, kind)
        run = policy(view, 0)
        layer, group = algorithm_1(*split(view, kind), K, delta)
        assert (run.layer, run.group) == (layer, group + (kind == EXPERT_WORKER))


@pytest.mark.parametrize(("K", "delta"), SIZES)
def test_on_a_device_with_both_kinds_each_stage_counts_at_its_distance(K, delta):
    rng, policy = np.random.default_rng(0), Defrag(lookahead=K, decay=delta)
    for _ in range(ROUNDS):
        view = random_table(rng, COLOCATED)
        tokens = view.n.sum(axis=0)
        mean = tokens[:, 1:].mean(axis=1)
        run, wanted = policy(view, 0), by_stages(tokens[:, 0], mean, tokens, view.runnable.any(axis=0), K, delta)
        assert (run.layer, run.group) == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_without_lookahead_it_is_most_tokens_first(kind):
    rng = np.random.default_rng(5)
    for _ in range(ROUNDS):
        view = random_table(rng, kind)
        assert make_step_policy("defrag:lookahead=0", 1)(view, 0) == make_step_policy("mtfs", 1)(view, 0)


@pytest.mark.parametrize("lookback", [1, 10])
def test_with_a_lookback_it_adds_the_mean_of_its_last_choices_as_the_code_of_amoe(lookback):
    rng, policy, seen = np.random.default_rng(6), Defrag(lookback=lookback), []
    for _ in range(ROUNDS):
        view = random_table(rng, EXPERT_WORKER, num_layers=6, num_experts=3)
        Q, can_run = split(view, EXPERT_WORKER)
        history = np.mean(seen[-lookback:], axis=0).tolist() if seen else None
        run = policy(view, 0)
        assert (run.layer, run.group - 1) == algorithm_1(Q, can_run, 7, 0.8, history)
        seen.append([sum(row) for row in Q])


def test_a_look_back_changes_choices():
    policy = Defrag(lookahead=1, lookback=10)
    calm = queues({(0, 1): 3, (4, 1): 3})
    assert policy(calm, 0).layer == 0
    policy(queues({(5, 1): 90}), 0)  # layer 5 was busy, so the queue before it is worth more
    assert policy(calm, 0).layer == 4


def test_to_choose_alone_changes_no_history():
    policy, view = Defrag(lookback=2), queues({(1, 1): 3, (4, 2): 4})
    assert policy.choose(view) == policy.choose(view)
    assert not policy._history


def test_the_trial_leaves_no_history():
    assert not make_step_policy("defrag:lookback=10", 1)._history


def test_a_small_queue_before_a_dense_wave_runs_before_a_larger_lone_one():
    view = queues({(0, 4): 5, (2, 1): 2, (3, 1): 5, (3, 2): 5, (3, 3): 5, (3, 4): 5})
    assert make_step_policy("mtfs", 1)(view, 0).layer == 0
    assert Defrag(lookahead=1)(view, 0).layer == 2  # 2 + 0.8 * 5


def test_the_sampler_is_a_layer_and_looks_ahead_to_layer_0():
    view = queues({(0, ATTENTION): 4, (3, ATTENTION): 5, (6, ATTENTION): 2}, num_experts=0)
    assert make_step_policy("mtfs", 1)(view, 0).layer == 3
    assert Defrag(lookahead=1)(view, 0).layer == 6  # 2 + 0.8 * 4


@pytest.mark.parametrize("setting", ["lookahead=-1", "decay=1.5", "decay=-0.5", "lookback=-1"])
def test_senseless_settings_are_refused(setting):
    with pytest.raises(ConfigError, match="must be at least 0, and decay between 0 and 1"):
        make_step_policy(f"defrag:{setting}", 1)
