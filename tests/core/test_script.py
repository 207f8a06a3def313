import pytest

from moestro.core.request import Script


def test_a_script_ends_after_at_least_one_token():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Script(0)


def test_a_script_names_whole_blocks():
    with pytest.raises(ValueError, match="not a multiple of 16"):
        Script(1, b"short")
