"""Text to ids and back: the pieces join to what decoding at once gives, and torch stays out."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

from moestro.errors import ConfigError, RequestError
from moestro.text.tokenizer import Tokenizer
from moestro.text.tokenizer_library import TokenizerLibrary


def pieces_of(tokenizer: Tokenizer, prompt_ids: list[int], ids: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer(prompt_ids)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def byte_fallback_tokenizer(path) -> Tokenizer:
    """A SentencePiece-like vocabulary: words with their space, and every byte."""
    vocab = {"<unk>": 0, "▁Hello": 1, "▁world": 2, "!": 3, "▁": 4}
    vocab |= {f"<0x{byte:02X}>": 5 + byte for byte in range(256)}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.save(str(path / "tokenizer.json"))
    return Tokenizer(path)


def test_law_the_pieces_of_random_ids_join_to_the_text_decoded_at_once(tokenizer):
    rng = random.Random(0)
    num_ids = tokenizer.backend.get_vocab_size()
    for _ in range(2000):
        # Mostly single bytes, which rarely make a character; among them words and special tokens.
        ids = [rng.randrange(260) if rng.random() < 0.7 else rng.randrange(num_ids) for _ in range(rng.randrange(60))]
        prompt = [rng.randrange(num_ids) for _ in range(rng.randrange(30))]
        assert "".join(pieces_of(tokenizer, prompt, ids)) == tokenizer.backend.decode(ids)


def test_law_the_pieces_of_text_with_byte_tokens_join_to_the_text(tmp_path):
    tokenizer = byte_fallback_tokenizer(tmp_path)
    rng = random.Random(0)
    prompt, before = [1, 2], "Hello world"
    for _ in range(500):
        text = "".join(rng.choices(" é😀!€a", k=rng.randrange(20)))
        ids = [token_id for char in text for token_id in ([3] if char == "!" else [5 + b for b in char.encode()])]
        assert before + "".join(pieces_of(tokenizer, prompt, ids)) == tokenizer.backend.decode(prompt + ids)


class CountingBackend:
    """A tokenizer's library that counts the tokens that it decodes."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.num_decoded = 0

    def decode_batch(self, batch: list[list[int]], **options: bool) -> list[str]:
        self.num_decoded += sum(map(len, batch))
        return self._backend.decode_batch(batch, **options)

    def __getattr__(self, name: str):
        return getattr(self._backend, name)


class CountingStream:
    """A stream that decodes all that it holds at each step, as the library's does, and counts."""

    def __init__(self, ids: list[int] | None = None, **options: bool) -> None:
        self.stream, self.num_held = DecodeStream(ids=ids, **options), len(ids or ())

    def step(self, backend: CountingBackend, token_id: int) -> str | None:
        self.num_held += 1
        backend.num_decoded += self.num_held
        text = self.stream.step(backend._backend, token_id)
        self.num_held = 1 if text else self.num_held
        return text


def unfinished_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Tokens that never complete a character: first, middle and last bytes of one, and one that the model alone has."""
    found = {f"{byte:02x}": tokenizer.backend.token_to_id(symbol) for byte, symbol in UNFINISHED_BYTES.items()}
    return {**found, "unknown": tokenizer.backend.get_vocab_size() + 3}


UNFINISHED_BYTES = {0xE2: "â", 0xF0: "ð", 0x80: "Ģ", 0xBF: "¿", 0xC3: "Ã"}


@pytest.mark.parametrize("kind", ["e2", "f0", "80", "bf", "c3", "unknown"])
def test_the_cost_of_a_token_is_bounded_where_no_character_is_completed(tokenizer, monkeypatch, kind):
    token_id = unfinished_tokens(tokenizer)[kind]
    monkeypatch.setattr("moestro.text.tokenizer.DecodeStream", CountingStream)

    def cost(num_tokens: int) -> int:
        detokenizer = tokenizer.detokenizer([])
        backend = CountingBackend(tokenizer.backend)
        detokenizer._library = TokenizerLibrary(backend)
        text = "".join([detokenizer.push(token_id) for _ in range(num_tokens)]) + detokenizer.flush()
        assert text == tokenizer.backend.decode([token_id] * num_tokens)
        return backend.num_decoded

    assert cost(1000) <= 30 * 1000
    assert cost(2000) <= 2.2 * max(cost(1000), 1)


def test_bytes_that_never_are_a_character_are_shown_while_the_answer_grows(tmp_path):
    tokenizer = byte_fallback_tokenizer(tmp_path)
    pieces = pieces_of(tokenizer, [1], [5 + 0x80] * 40 + [2])
    assert "".join(pieces[:40]).count("\ufffd") >= 32
    assert "".join(pieces) == "\ufffd" * 40 + " world"


def test_other_threads_run_while_a_long_text_is_tokenized(tokenizer):
    text, ids = "word17 " * 60_000, []
    thread = threading.Thread(target=lambda: ids.extend(tokenizer.encode(text, add_special_tokens=False)))
    thread.start()
    num_turns = 0
    while thread.is_alive():
        time.sleep(0.001)
        num_turns += 1
    assert len(ids) > 60_000
    assert num_turns > 5, "with the lock held, one turn or two"


def test_a_first_tokens_space_survives_after_a_prompt(tmp_path):
    tokenizer = byte_fallback_tokenizer(tmp_path)
    assert pieces_of(tokenizer, [], [2, 3]) == ["world", "!", ""], "the first of all"
    assert pieces_of(tokenizer, [1], [2, 3]) == [" world", "!", ""]


def test_invalid_bytes_of_a_byte_fallback_vocabulary_do_not_break_the_stream(tmp_path):
    tokenizer = byte_fallback_tokenizer(tmp_path)
    rng = random.Random(0)
    for _ in range(500):
        ids = [rng.randrange(261) for _ in range(40)]
        assert isinstance("".join(pieces_of(tokenizer, [], ids)), str)


def test_the_end_does_not_repeat_text_that_later_bytes_would_rewrite(tmp_path):
    first, second = (5 + byte for byte in "é".encode())
    assert pieces_of(byte_fallback_tokenizer(tmp_path), [], [first, second, first]) == ["", "é", "", ""]


def test_an_unfinished_character_waits_for_its_bytes(tokenizer):
    ids = tokenizer.backend.encode("a😀b").ids
    assert [piece for piece in pieces_of(tokenizer, [], ids) if piece] == ["a", "😀", "b"]


def test_an_unfinished_character_at_the_end_is_flushed_as_decoding_shows_it(tokenizer):
    ids = tokenizer.backend.encode("a😀").ids[:-1]
    assert pieces_of(tokenizer, [], ids)[-1] == "\ufffd"


def test_encode_agrees_with_transformers(tokenizer, demo_dir):
    theirs = PreTrainedTokenizerFast.from_pretrained(demo_dir)
    for text in ("def f(x):\n    return x", "é😀 \x00 a<|im_end|>b"):
        for special in (True, False):
            ours = tokenizer.encode(text, add_special_tokens=special)
            assert ours == theirs(text, add_special_tokens=special).input_ids


def test_a_chat_is_rendered_up_to_the_assistants_turn(tokenizer):
    text = tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert "hi" in text
    assert text.rstrip().endswith("assistant")


def test_a_model_without_a_chat_template_says_so(tmp_path):
    tokenizer = byte_fallback_tokenizer(tmp_path)
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('roles must alternate') }}", "{{ ''.__class__.__mro__ }}", "{% for %}"]
)
def test_a_template_that_refuses_is_the_clients_400(tmp_path, template):
    byte_fallback_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(RequestError, match="chat template refuses"):
        Tokenizer(tmp_path).render_chat([{"role": "user", "content": "hi"}])


def test_a_missing_or_broken_tokenizer_names_the_remedy(tmp_path):
    with pytest.raises(ConfigError, match="--tokenizer DIR"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot load the tokenizer"):
        Tokenizer(tmp_path)


def test_loading_a_tokenizer_does_not_load_torch(demo_dir):
    code = (
        "import sys; from pathlib import Path; from moestro.text.tokenizer import Tokenizer;"
        f" Tokenizer(Path({str(demo_dir)!r})); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- single tokens


def test_law_the_bytes_of_single_tokens_join_to_those_of_the_text(tokenizer):
    for text in ("def f(x):\n    return x\n", "naïve 😀 text", "👩\u200d👩\u200d👧 e\u0301", "\t \x00\u202e", "日本語"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(tokenizer.token_texts[token_id].raw for token_id in ids) == text.encode()


def test_no_two_tokens_of_a_byte_level_vocabulary_read_alike(tokenizer):
    texts = [tokenizer.token_texts[token_id].text for token_id in range(tokenizer.backend.get_vocab_size())]
    assert len(set(texts)) == len(texts)
    assert not any("\ufffd" in text for text in texts)


def test_a_token_is_shown_with_its_space_a_byte_by_its_value_and_a_special_token_by_its_name(tokenizer, tmp_path):
    spelt = byte_fallback_tokenizer(tmp_path)
    hello, half = spelt.token_texts[1], spelt.token_texts[5 + 0xE2]
    assert (hello.text, hello.raw) == (" Hello", b" Hello")
    assert (half.text, half.raw) == ("bytes:\\xe2", b"\xe2")
    assert spelt.token_texts[5 + ord("A")].text == "A"
    special = min(tokenizer.special_ids)
    assert tokenizer.token_texts[special].text == tokenizer.backend.id_to_token(special)


def test_special_tokens_that_a_format_needs_keep_their_text(tokenizer):
    ids = tokenizer.encode("a<|im_start|>日b<|im_end|>c", add_special_tokens=False)
    shown = tokenizer.special_ids_of({"<|im_start|>", "a", "no token"})
    assert len(shown) == 1
    for kept, text in ((frozenset(), "a日bc"), (shown, "a<|im_start|>日bc"), (tokenizer.special_ids, None)):
        decoded = tokenizer.detokenizer([], kept)
        found = "".join(decoded.push(token_id) for token_id in ids) + decoded.flush()
        assert found == (text or "a<|im_start|>日b<|im_end|>c")
    within = tokenizer.encode("日", add_special_tokens=False)[:1] + list(shown)
    cut = tokenizer.detokenizer([], shown)
    assert "".join(map(cut.push, within)) + cut.flush() == "\ufffd<|im_start|>"


def test_a_template_is_a_file_or_a_text(demo_dir, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[0].content }}!")
    for given in (str(file), "{{ messages[0].content }}!"):
        own = Tokenizer(demo_dir, given)
        assert own.render_chat([{"role": "user", "content": "hi"}]) == "hi!"
        own.close()
    with pytest.raises(ConfigError, match="--chat-template"):
        Tokenizer(demo_dir, str(tmp_path / "none"))
