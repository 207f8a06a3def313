"""Ids of the end that are none are refused in one short sentence."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from moestro.errors import UnsupportedModelError
from moestro.files.config_fields import refuse_sizes
from moestro.model.settings import eos_token_ids

TEXT = SimpleNamespace(eos_token_id=None, vocab_size=32)
CONFIG = SimpleNamespace(eos_token_id=None, get_text_config=lambda: TEXT)


@pytest.mark.parametrize("given", [list(range(300_000)), [10**50], "x" * 300_000, 1.5, [True]])
def test_a_generation_config_with_wrong_ids_is_refused_in_a_short_sentence(given):
    with pytest.raises(UnsupportedModelError, match=r"^generation_config.json: eos_token_id must be ") as caught:
        eos_token_ids({"eos_token_id": given}, {}, CONFIG)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("given", [1.5, [2, 1.5], "2", {}, [[2]], True])
def test_a_config_with_ids_that_are_no_numbers_is_refused_by_name(given):
    with pytest.raises(UnsupportedModelError, match="eos_token_id must be a whole number or a list of them"):
        refuse_sizes({"text_config": {"eos_token_id": given}}, Path("config.json"))
