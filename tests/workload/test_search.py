import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.workload.run_records import Bracket, Verdict, find_highest


def step_at(capacity, probed, above=Verdict.FAILS):
    def probe(rate):
        probed.append(rate)
        return Verdict.HOLDS if rate <= capacity else above

    return probe


@given(st.floats(0.01, 1000), st.floats(0.01, 1000), st.floats(0.01, 0.5))
def test_the_true_capacity_lies_in_the_bracket_found(capacity, start, tolerance):
    probed = []
    found = find_highest(step_at(capacity, probed), start, tolerance, 60)
    assert found.holds <= capacity < found.above <= found.holds * (1 + tolerance) * (1 + 1e-9)
    assert len(set(probed)) == len(probed), "no rate is probed twice"


def test_it_stops_at_the_probes_allowed():
    probed = []
    assert find_highest(step_at(100, probed), 1, 0.01, 3) == Bracket(4, None, False)
    assert probed == [1, 2, 4]
    assert find_highest(step_at(0.1, []), 1, 0.01, 2) == Bracket(None, 0.5, False)


@pytest.mark.parametrize("above", [Verdict.FAILS, Verdict.INVALID])
def test_a_bound_that_the_client_set_is_reported_as_such(above):
    found = find_highest(step_at(10, [], above), 1, 0.05, 40)
    assert found.is_client_bound == (above is Verdict.INVALID)
