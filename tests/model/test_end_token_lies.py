"""Ids of the end that are none are refused in one short sentence; the tokenizer's own end counts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from moestro.errors import UnsupportedModelError
from moestro.files.config_fields import refuse_sizes
from moestro.model.settings import eos_token_ids, tokenizer_end

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


END = "<|im_end|>"


@pytest.mark.parametrize(
    ("config", "added", "wanted"),
    [
        ({"eos_token": END, "added_tokens_decoder": {"3": {"content": "<x>"}, "7": {"content": END}}}, [], 7),
        ({"eos_token": {"content": END, "lstrip": False}}, [{"id": 9, "content": END, "special": True}], 9),
        ({"eos_token": END, "added_tokens_decoder": {"3": {"content": "<x>"}}}, [{"id": 9, "content": END}], 9),
        ({"eos_token": END}, [{"id": 32, "content": END}], None),  # The network lacks it.
        ({"eos_token": END}, [{"id": 9, "content": "<x>"}], None),
        ({"eos_token": None}, [{"id": 9, "content": END}], None),
        ({"eos_token": END, "added_tokens_decoder": [END]}, "no list", None),
        (None, [{"id": 9, "content": END}], None),
    ],
)
def test_the_end_of_a_tokenizer_is_found_in_its_files(tmp_path, config, added, wanted):
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": added, "model": {}}))
    assert tokenizer_end(tmp_path, TEXT.vocab_size) == wanted
