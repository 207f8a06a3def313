"""What the tokenizers library raises, panics included, ends one request, or the load with a sentence."""

from __future__ import annotations

import json
import logging
import shutil

import pytest
from tokenizers.decoders import DecodeStream

from moestro.core.processes import NativePanic, as_exception, cause_of
from moestro.errors import ConfigError
from moestro.text import tokenizer_library
from moestro.text.tokenizer import Tokenizer
from moestro.text.tokenizer_library import TextLimitError, TokenizerError

SECRET = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!"  # the regular expression below gives up on it
HARD = {"Regex": "(a+)+$"}

# Changes of tokenizer.json with which the library panics or raises for any text: at the load, or at the first text.
LIES_AT_LOAD = {
    "a normalizer of junk": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AQ=="}},
    "a normalizer of the wrong length": {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "x"}},
    "pieces of no length": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "no unknown token": {"model": {"type": "WordLevel", "unk_token": "[UNK]", "vocab": {"b": 0}}},
    "an empty vocabulary": {"model": {"type": "Unigram", "unk_id": None, "vocab": [], "byte_fallback": False}},
    "an unknown token beyond the vocabulary": {
        "model": {"type": "Unigram", "unk_id": 7, "vocab": [["a", -1.0]], "byte_fallback": False}
    },
    "a prefix longer than tokens": {
        "model": {
            "type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]],
            "continuing_subword_prefix": "long",
        }
    },
    "a special token that is not defined": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "Y", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        }
    },
    "another model": {"model": {"type": "Nonsense"}},
    "no model": {"model": None},
    "a decoder of another kind": {"decoder": 3},
}  # fmt: skip


@pytest.fixture
def directory(demo_dir, tmp_path):
    return shutil.copytree(demo_dir, tmp_path / "checkpoint", ignore=shutil.ignore_patterns("model.safetensors"))


def doctor(directory, **changes):
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


def hard_to_encode(directory):
    return doctor(directory, pre_tokenizer={"type": "Split", "pattern": HARD, "behavior": "Isolated", "invert": False})


@pytest.fixture
def fresh_log(monkeypatch):
    monkeypatch.setattr(tokenizer_library, "_due_s", 0.0)
    monkeypatch.setattr(tokenizer_library, "_num_left_out", 0)


@pytest.mark.parametrize("lie", LIES_AT_LOAD)
def test_a_tokenizer_that_fails_for_any_text_is_refused_at_load(lie, directory):
    doctor(directory, **LIES_AT_LOAD[lie])
    with pytest.raises(ConfigError, match="cannot load the tokenizer in"):
        Tokenizer(directory)


def test_a_text_on_which_a_pattern_gives_up_is_refused(directory, fresh_log, caplog):
    tokenizer = Tokenizer(hard_to_encode(directory))
    with pytest.raises(TextLimitError, match=r"gave up on this text.*Change the text") as raised:
        tokenizer.encode(SECRET, add_special_tokens=True)
    assert (raised.value.http_status, raised.value.code) == (400, "tokenizer_limit")
    assert tokenizer.encode("def f():", add_special_tokens=True)
    assert not caplog.records


def test_a_panic_while_encoding_is_an_error_of_the_request(directory, fresh_log):
    normalizer = {"type": "Replace", "pattern": {"Regex": "(?=zqzq)"}, "content": "x"}
    tokenizer = Tokenizer(doctor(directory, normalizer=normalizer))
    with pytest.raises(TokenizerError, match="cannot encode this text") as raised:
        tokenizer.encode("zqzq", add_special_tokens=True)
    assert raised.value.http_status == 500
    assert tokenizer.encode("def f():", add_special_tokens=True)


def test_a_panic_while_decoding_is_an_error_of_the_request(directory, fresh_log):
    bytes_to_text = json.loads((directory / "tokenizer.json").read_text())["decoder"]
    decoders = [bytes_to_text, {"type": "Replace", "pattern": HARD, "content": ""}]
    tokenizer = Tokenizer(doctor(directory, decoder={"type": "Sequence", "decoders": decoders}))
    ids = tokenizer.encode(SECRET, add_special_tokens=False)
    with pytest.raises(TokenizerError, match="cannot decode these tokens"):
        tokenizer.decode(ids)
    stream = DecodeStream(ids=ids[:-1], skip_special_tokens=False)
    with pytest.raises(TokenizerError, match="cannot decode these tokens"):
        tokenizer.library.step(stream, ids[-1])
    assert tokenizer.decode(tokenizer.encode("def f():", add_special_tokens=False)) == "def f():"


def test_the_cause_is_logged_once_a_minute_without_the_text(directory, fresh_log, caplog):
    bytes_to_text = json.loads((directory / "tokenizer.json").read_text())["decoder"]
    decoders = [bytes_to_text, {"type": "Replace", "pattern": HARD, "content": ""}]
    tokenizer = Tokenizer(doctor(directory, decoder={"type": "Sequence", "decoders": decoders}))
    ids = tokenizer.encode(SECRET, add_special_tokens=False)
    with caplog.at_level(logging.ERROR):
        for _ in range(5):
            with pytest.raises(TokenizerError):
                tokenizer.decode(ids)
    assert len(caplog.records) == 1
    assert "retry-limit-in-match" in caplog.text
    assert "aaaa" not in caplog.text


def test_what_a_panic_quotes_is_not_part_of_its_cause():
    error = NativePanic("panic: byte index 2 is not a char boundary; it is inside 'é' (bytes 1..3) of `secret`")
    assert cause_of(error) == "NativePanic: panic: byte index 2 is not a char boundary; it is inside"


def test_an_interrupt_is_no_error_of_a_library():
    with pytest.raises(KeyboardInterrupt):
        as_exception(KeyboardInterrupt())


@pytest.mark.parametrize("template", [3, ["x"], {"default": 3}, True])
def test_a_template_of_another_kind_is_refused(template, directory):
    (directory / "chat_template.jinja").unlink()
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    with pytest.raises(ConfigError, match="cannot load the tokenizer in"):
        Tokenizer(directory)
