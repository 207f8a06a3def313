import numpy as np
import pytest

from moestro.errors import ConfigError
from moestro.workload.generated.draws import SHAPES, draw_shape
from moestro.workload.rows import Rows


def rng():
    return np.random.default_rng(0)


def mix(count=4000):
    """Mostly short prompts, as in life; the answer tells which prompt it belongs to."""
    lengths = np.minimum(np.rint(rng().lognormal(5.5, 1.2, count)), 3500).astype(np.int64)
    return Rows(lengths, lengths + 1)


def thirds(rows):
    return np.histogram(rows.num_prompt_tokens, 3, (0, 3000))[0] / len(rows)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_drawn_shape_has_the_mix_that_its_name_says(shape):
    rows = mix()
    drawn = draw_shape(rows, shape, 3000, rng())
    assert len(drawn) == 3000
    assert (drawn.num_output_tokens == drawn.num_prompt_tokens + 1).all(), "answers stay with their prompts"
    assert set(drawn.num_prompt_tokens) <= set(rows.num_prompt_tokens)
    expected = {
        "random": np.histogram(rows.num_prompt_tokens, 3, (0, 3000))[0] / len(rows),
        "average": [1 / 3, 1 / 3, 1 / 3],
        "descending": [5 / 9, 3 / 9, 1 / 9],
        "central": [2 / 9, 5 / 9, 2 / 9],
        "two-end": [4 / 9, 1 / 9, 4 / 9],
    }[shape]
    assert thirds(drawn) == pytest.approx(expected, abs=0.03)


def test_requests_of_one_length_are_drawn_all_alike():
    rows = Rows(np.full(10, 7), np.arange(10) + 1)
    drawn = draw_shape(rows, "average", 5000, rng(), longest=10)
    assert np.bincount(drawn.num_output_tokens, minlength=11)[1:].min() > 350


def test_the_mix_itself_is_drawn_without_repeating_anybody_while_there_are_enough():
    rows = Rows(np.arange(100) + 1, np.arange(100) + 1)
    assert sorted(draw_shape(rows, "random", 100, rng()).num_prompt_tokens) == list(range(1, 101))
    assert len(draw_shape(rows, "random", 300, rng())) == 300


def test_unknown_shapes_and_texts_are_refused():
    with pytest.raises(ConfigError, match="length shape 'bell' is unknown: give one of random, central"):
        draw_shape(mix(), "bell", 1, rng())
    with pytest.raises(ConfigError, match="prompts as text"):
        draw_shape(Rows(np.zeros(1, np.int64), np.ones(1, np.int64), texts=("a",)), "average", 1, rng())
