"""Layered prefill: which layers prompts pass with which decodes, on a device that only moves units on."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from msgspec.structs import replace
from support.queue_tables import queues, table_of

from moestro.core.views import ATTENTION, BE, EVERY_EXPERT, LS, NUM_CLASSES, QueueTable
from moestro.errors import ConfigError
from moestro.flow.policies.layered_prefill import LayeredPrefill
from moestro.flow.policies.one_queue import ALL
from moestro.flow.registry import make_step_policy

NUM_LAYERS = 8


@dataclass
class Unit:
    """Tokens that move together.

    Attributes:
        num_tokens: 1 for a decode.
        layer: before whose attention it waits.
        passes: decode passes, or with whom a prompt passed each layer: True with decodes.
    """

    num_tokens: int
    service_class: int = LS
    layer: int = 0
    passes: int = 0
    joined: dict[int, bool] = field(default_factory=dict)


class Network:
    """One device: units before attentions, and passages that end where the policy says. Decodes begin again at once."""

    def __init__(self, policy, num_decodes: int, num_layers: int = NUM_LAYERS) -> None:
        self.policy, self.num_layers = policy, num_layers
        self.units = [Unit(1) for _ in range(num_decodes)]
        self.done: list[Unit] = []
        self.num_loads = 0  # layers whose experts a passage loads

    def table(self) -> QueueTable:
        n = np.zeros((NUM_CLASSES, self.num_layers + 1, 3), np.int32)
        prefill = np.zeros(n.shape[:2], np.int32)
        for unit in self.units:
            n[unit.service_class, unit.layer, ATTENTION] += unit.num_tokens
            prefill[unit.service_class, unit.layer] += unit.num_tokens * (unit.num_tokens > 1)
        return replace(table_of(n), num_prefill_tokens=prefill)

    def step(self, withdrawn_at: int = ALL) -> list[Unit]:
        """Run what the policy chooses, as far as the layer `withdrawn_at` if that is nearer."""
        run = self.policy(self.table(), 0)
        taken = [unit for unit in self.units if unit.layer == run.layer and unit.num_tokens <= run.max_unit_tokens]
        assert taken, f"{run} took nothing"
        until = max(min(run.until, self.num_layers + 1, withdrawn_at), run.layer + 1)
        self.num_loads += min(until, self.num_layers) - run.layer
        has_decodes = any(unit.num_tokens == 1 for unit in taken)
        for unit in taken:
            for layer in range(run.layer, min(until, self.num_layers)):
                assert layer not in unit.joined or unit.num_tokens == 1, "a prompt passes each layer once"
                unit.joined[layer] = has_decodes
            unit.layer = until
            if until == self.num_layers + 1:
                self._leave(unit)
        return taken

    def _leave(self, unit: Unit) -> None:
        unit.layer, unit.passes = 0, unit.passes + 1
        if unit.num_tokens > 1:
            self.units.remove(unit)
            self.done.append(unit)

    def decode_pass(self) -> int:
        """Run until every decode has a token; return the layers that prompts advanced."""
        prompts = [unit for unit in self.units if unit.num_tokens > 1]
        before, decodes = sum(len(unit.joined) for unit in prompts), [u for u in self.units if u.num_tokens == 1]
        wanted = decodes[0].passes + 1
        while any(unit.passes < wanted for unit in decodes):
            self.step()
        return sum(len(unit.joined) for unit in prompts) - before


def in_groups(num_groups: int) -> LayeredPrefill:
    """A policy that gives waves of any length so many groups."""
    return LayeredPrefill(num_groups=num_groups, tokens_per_group=1)


@pytest.mark.parametrize(("num_tokens", "num_passes"), [(2, 1), (512, 1), (513, 2), (1024, 2), (1500, 3), (9000, 8)])
def test_a_longer_wave_has_more_groups(num_tokens, num_passes):
    network = Network(LayeredPrefill(num_groups=8), num_decodes=2)
    network.units += [Unit(num_tokens)]
    for passed in range(num_passes):
        assert not network.done, passed
        network.decode_pass()
    assert len(network.done) == 1


def test_the_groups_of_a_wave_stay_as_they_are_while_other_prompts_come():
    network = Network(LayeredPrefill(num_groups=8), num_decodes=1)
    network.units.append(Unit(1024))
    assert network.decode_pass() == NUM_LAYERS // 2
    network.units.append(Unit(4096))
    assert network.decode_pass() == NUM_LAYERS // 2
    assert len(network.done) == 1
    assert network.decode_pass() == NUM_LAYERS // 8


@pytest.mark.parametrize(("num_groups", "num_passes"), [(1, 1), (2, 2), (4, 4), (8, 8), (100, 8)])
def test_a_prompt_passes_one_group_of_layers_in_each_pass_of_the_decodes_and_always_with_them(num_groups, num_passes):
    network = Network(in_groups(num_groups), num_decodes=3)
    prompt = Unit(500)
    network.units.append(prompt)
    for passed in range(num_passes):
        assert prompt not in network.done, passed
        assert network.decode_pass() == NUM_LAYERS // num_passes
    assert prompt in network.done
    assert prompt.joined == dict.fromkeys(range(NUM_LAYERS), True)


def test_a_prompt_adds_no_load_of_any_experts_to_those_of_the_decodes():
    network = Network(in_groups(4), num_decodes=3)
    network.units.append(Unit(500))
    for _ in range(4):
        network.decode_pass()
    assert network.num_loads == 4 * NUM_LAYERS


def test_groups_are_equal_up_to_one_layer():
    policy = in_groups(3)
    view = queues({(0, ATTENTION): 9}, num_layers=NUM_LAYERS)
    policy(replace(view, num_prefill_tokens=view.n[:, :, ATTENTION]), 0)
    ends = [policy._end_of_group(layer, 8) for layer in range(8)]
    assert ends == [2, 2, 5, 5, 5, ALL, ALL, ALL]


def test_without_decodes_a_prompt_runs_on_group_by_group():
    network = Network(in_groups(4), num_decodes=0)
    network.units.append(Unit(500))
    for _ in range(4):
        network.step()
    assert len(network.done) == 1


def test_decodes_that_come_while_a_prompt_runs_alone_pass_it_and_then_join_it():
    network = Network(in_groups(2), num_decodes=0)
    prompt, decode = Unit(500), Unit(1)
    network.units.append(prompt)
    network.step(withdrawn_at=3)
    network.units.append(decode)
    assert network.step() == [decode]
    assert decode.layer == 3
    assert network.step() == [prompt, decode]
    assert prompt.layer == decode.layer == 4
    assert network.step() == [decode]
    assert decode.passes == 1


def test_prompts_that_come_later_wait_until_the_wave_before_them_has_left():
    network = Network(in_groups(2), num_decodes=1)
    early, late = Unit(500), Unit(300)
    network.units.append(early)
    network.decode_pass()
    network.units.append(late)
    network.decode_pass()
    assert early in network.done
    assert not late.joined
    assert network.decode_pass() == NUM_LAYERS // 2


def test_prompts_that_wait_together_are_one_wave():
    network = Network(in_groups(2), num_decodes=1)
    network.units += [Unit(500), Unit(40, BE)]
    assert network.decode_pass() == 2 * NUM_LAYERS // 2
    network.decode_pass()
    assert len(network.done) == 2


def test_a_withdrawn_run_goes_on_together():
    network = Network(in_groups(2), num_decodes=1)
    prompt = Unit(500)
    network.units.append(prompt)
    network.step(withdrawn_at=2)
    taken = network.step()
    assert prompt in taken
    assert len(taken) == 2
    assert prompt.layer == 4


def test_what_a_withdrawal_left_among_experts_completes_its_layer_first():
    run = LayeredPrefill()(queues({(0, ATTENTION): 3, (2, 1): 4, (2, 3): 1, (5, ATTENTION): 2}), 0)
    assert (run.layer, run.group, run.classes) == (2, EVERY_EXPERT, (LS, BE))


def test_while_the_wave_lacks_places_what_can_run_does():
    view = queues({(0, ATTENTION): 9, (4, ATTENTION): 90}, num_layers=NUM_LAYERS)
    runnable = view.runnable.copy()
    runnable[LS, 4] = False
    policy = in_groups(4)
    begin = queues({(0, ATTENTION): 90}, num_layers=NUM_LAYERS)
    policy(replace(begin, num_prefill_tokens=begin.n[:, :, ATTENTION]), 0)
    run = policy(replace(view, runnable=runnable, num_prefill_tokens=view.n[:, :, ATTENTION]), 0)
    assert (run.layer, run.until) == (0, 2)


@pytest.mark.parametrize("num_groups", [1, 3, 16])
def test_law_everything_ends_and_no_pass_of_the_decodes_waits_for_more_than_one_group(num_groups):
    rng = np.random.default_rng(num_groups)
    largest_group = -(-NUM_LAYERS // min(num_groups, NUM_LAYERS))
    for _ in range(20):
        network = Network(in_groups(num_groups), num_decodes=int(rng.integers(1, 4)))
        prompts = []
        for _ in range(60):
            if rng.random() < 0.2:
                prompts.append(Unit(int(rng.integers(2, 900)), int(rng.choice([LS, BE]))))
                network.units.append(prompts[-1])
            before = {id(unit): len(unit.joined) for unit in prompts}
            network.decode_pass()
            assert all(len(unit.joined) - before[id(unit)] <= largest_group for unit in prompts)
        for _ in range((len(prompts) + 1) * num_groups):
            network.decode_pass()
        assert prompts
        assert len(network.done) == len(prompts)
        assert all(all(unit.joined.values()) for unit in prompts)


def test_the_registry_makes_it_with_its_groups():
    assert make_step_policy("layered_prefill:num_groups=4", 1) == LayeredPrefill(num_groups=4)
    with pytest.raises(ConfigError, match="num_groups and tokens_per_group must be at least 1"):
        make_step_policy("layered_prefill:num_groups=0", 1)
