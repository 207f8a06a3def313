"""What the router reads of a body: prompts that begin alike have blocks that begin alike; nothing is refused."""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from robustness.strangers.nasty_json import BODIES, nasty_body
from support.fake_rank import INFO

from moestro.core.clients import MAX_ELEMENTS
from moestro.core.hashing import HASH_BYTES, hash_blocks, hash_key, hash_text, split_hashes
from moestro.gateway.clients import request_body
from moestro.gateway.clients.http_headers import Incoming, RequestHead
from moestro.gateway.clients.paths import BATCH_PATH, CHAT_PATH
from moestro.gateway.clients.request_body import NOTHING, plain_text, prompt_key, read, request_from_text
from moestro.gateway.clients.tokenized_blocks import TokenizedReader
from moestro.server.api.request_builder import ServedModel, chat_prompt
from moestro.server.api.validation import parse_chat
from moestro.text.tokenizer import Tokenizer

FUNCTION = {"type": "function", "function": {"name": "g"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [FUNCTION]}}
LONG = "You are a helpful assistant. " * 40


def incoming(body: object, **named: str) -> Incoming:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    names = {name.replace("_", "-").encode(): value.encode() for name, value in named.items()}
    return Incoming(RequestHead(b"POST", b"/v1/x", [], names), data, request_id="r")


def request(body: object, block_bytes: int = 64, **named: str):
    arrived = incoming(body, **named)
    return request_from_text(read(arrived.body, CHAT_PATH), arrived, 7, block_bytes)


def shared_blocks(first: object, second: object) -> int:
    names = [split_hashes(request(body).block_hashes) for body in (first, second)]
    return sum(a == b for a, b in zip(*names, strict=False))


def turn(role: str, content: object) -> dict[str, object]:
    return {"role": role, "content": content}


def test_the_next_turn_of_a_conversation_begins_with_the_blocks_of_the_last():
    first = [turn("system", LONG), turn("user", "hello " * 50)]
    second = [*first, turn("assistant", "hi " * 30), turn("user", "more")]
    whole = len(split_hashes(request({"messages": first}).block_hashes))
    assert whole > 20
    assert shared_blocks({"messages": first}, {"messages": second, "stream": True}) == whole


def test_the_spelling_of_the_json_does_not_matter():
    plain = json.dumps({"messages": [turn("user", LONG + "é")]}).encode()
    spaced = json.dumps({"stream": True, "messages": [turn("user", LONG + "é")]}, indent=3, ensure_ascii=False).encode()
    parts = json.dumps({"messages": [turn("user", [{"type": "text", "text": LONG}, {"type": "text", "text": "é"}])]})
    names = {request(body).block_hashes for body in (plain, spaced, parts.encode())}
    assert len(names) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"model": "n", "messages": [turn("user", LONG)]},
        {"model": "m", "messages": [turn("user", LONG)], "cache_salt": "s"},
        {"model": "m", "messages": [turn("user", LONG)], "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"model": "m", "messages": [turn("system", LONG)]},
        {"model": "m", "messages": [turn("user", "x" + LONG)]},
        {
            "model": "m",
            "messages": [turn("user", [{"type": "image_url", "image_url": {"url": "u"}}]), turn("user", LONG)],
        },
    ],
    ids=["model", "salt", "tools", "role", "text", "image"],
)
def test_what_makes_another_prompt_makes_other_blocks(other):
    assert shared_blocks({"model": "m", "messages": [turn("user", LONG)]}, other) == 0


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": LONG},
        {"prompt": list(range(500))},
        {"prompt": [LONG, LONG]},
        {"input": LONG},
        {"input": [turn("user", LONG)]},
        {"text": LONG},
        {"system": LONG, "messages": [turn("user", "x")]},
        {"system": [{"type": "text", "text": LONG}], "messages": [turn("user", "x")]},
        {"instructions": LONG, "input": "x"},
    ],
)
def test_every_api_that_begins_with_a_prompt_has_blocks(body):
    params = request(body)
    assert len(split_hashes(params.block_hashes)) >= 10
    assert params.num_prompt_tokens > 100


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"messages": 5}', b'{"messages": [{"content": 1}]}',
        b'{"n": NaN}', b'{"model": 5, "prompt": "x"}', b"[" * 100_000, b'{"prompt":' + b"[" * 100_000, b"--x\r\n\r\n",
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_routed_by_its_length(body):
    params = request(body)
    assert params.block_hashes == b""
    assert params.num_prompt_tokens == max(1, len(body) // 4)


def test_nulls_are_as_if_they_were_not_there():
    body = dict.fromkeys(("model", "messages", "prompt", "tools", "system", "user", "max_tokens", "cache_salt"))
    assert plain_text(read(json.dumps(body).encode(), CHAT_PATH)) == b""
    assert request({**body, "messages": [{"role": "user", "content": None, "tool_calls": None}]}).num_prompt_tokens >= 1


@pytest.mark.parametrize(
    ("body", "named", "session", "user"),
    [
        ({"user": "u", "prompt_cache_key": "k"}, {}, "k", "u"),
        ({"session_id": "s", "prompt_cache_key": "k"}, {}, "s", None),
        ({"session_id": "s"}, {"x_session_affinity": "h"}, "h", None),
        ({}, {"x_session_id": "h"}, "h", None),
        ({"user": "u" * 1000}, {"x_session_id": "h" * 1000}, "h" * 256, "u" * 256),
        ({}, {}, None, None),
    ],
)
def test_whose_request_it_is_and_of_which_session(body, named, session, user):
    params = request(body, **named)
    assert (params.session_id, params.user) == (session, user)


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        ({"max_tokens": 5, "max_completion_tokens": 7}, 7),
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 0}, 0),
        ({"max_output_tokens": 9}, 9),
        ({"max_tokens": -5}, 0),
        ({}, 16),
    ],
)
def test_how_much_may_be_generated(body, limit):
    assert request(body).sampling.max_tokens == limit


def test_law_text_blocks_are_the_same_as_far_as_texts_are():
    rng, key = random.Random(0), hash_key("m")
    for _ in range(200):
        size = rng.choice([16, 64, 256])
        text = rng.randbytes(rng.randrange(1000))
        same = rng.randrange(len(text) + 1)
        other = text[:same] + rng.randbytes(rng.randrange(500))
        one, two = (split_hashes(hash_text(key, each, size)) for each in (text, other))
        assert len(one) == len(text) // size
        alike = next(
            (i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other))
        )
        for i, (a, b) in enumerate(zip(one, two, strict=False)):
            assert (a == b) == ((i + 1) * size <= alike)
        assert not set(one) & set(split_hashes(hash_text(hash_key("n"), text, size)))
        assert len({len(name) for name in one} | {HASH_BYTES}) == 1


class TestExact:
    """With a tokenizer: the blocks that an engine has."""

    @pytest.fixture
    def reader(self, tokenizer):
        return TokenizedReader(tokenizer, 16)

    def test_a_prompts_blocks_are_those_of_its_tokens(self, reader, tokenizer):
        arrived = incoming({"model": "m", "prompt": LONG, "cache_salt": "s"})
        params = reader(read(arrived.body, CHAT_PATH), arrived, 0)
        ids = tokenizer.encode(LONG, add_special_tokens=True)
        assert params.num_prompt_tokens == len(ids)
        assert params.block_hashes == hash_blocks(prompt_key("m", "s"), np.array(ids, np.int32), 16)

    def test_token_ids_and_the_first_of_several_prompts_are_taken_as_they_are(self, reader, tokenizer):
        ids = tokenizer.encode(LONG, add_special_tokens=True)
        names = {
            reader(read(arrived.body, CHAT_PATH), arrived, 0).block_hashes
            for prompt in (LONG, ids, [ids], [LONG, "other"])
            for arrived in [incoming({"prompt": prompt})]
        }
        assert len(names) == 1

    def test_a_text_for_which_the_tokenizer_panics_is_routed_by_its_length(self, demo_dir, tmp_path):
        directory = shutil.copytree(demo_dir, tmp_path / "copy", ignore=shutil.ignore_patterns("model.safetensors"))
        path = directory / "tokenizer.json"
        normalizer = {"type": "Replace", "pattern": {"Regex": "(?=zqzq)"}, "content": "x"}
        path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": normalizer}))
        arrived = incoming({"prompt": "zqzq"})
        params = TokenizedReader(Tokenizer(directory), 16)(read(arrived.body, CHAT_PATH), arrived, 0)
        assert params.num_prompt_tokens
        assert not params.block_hashes

    def test_a_chat_goes_through_the_models_template(self, reader, tokenizer):
        messages = [turn("user", [{"type": "text", "text": LONG}])]
        arrived = incoming({"messages": messages})
        text = tokenizer.render_chat([turn("user", LONG)])
        params = reader(read(arrived.body, CHAT_PATH), arrived, 0)
        assert params.num_prompt_tokens == len(tokenizer.encode(text, add_special_tokens=False))
        assert params.block_hashes

    @pytest.mark.parametrize("choice", ["required", ALLOWED], ids=["required", "allowed"])
    def test_a_chat_with_tools_and_variables_has_the_engines_tokens(self, demo_dir, choice):
        template = (
            "{% for each in messages %}{{ each.role }}{{ each.content }}{{ each.reasoning }}{{ each.tool_call_id }}"
            "{% for call in each.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
            "{{ tools | tojson }}{{ color }}{{ enable_thinking }}{{ add_generation_prompt }}"
        )
        tokenizer = Tokenizer(demo_dir, template)
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, 2]}'}}
        body = {
            "messages": [
                turn("user", [{"type": "text", "text": LONG}, {"type": "text", "text": "more"}]),
                {"role": "assistant", "tool_calls": [call], "reasoning_content": "Hm."},
                {"role": "tool", "tool_call_id": "a", "content": "3"},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "description": "é"}}, FUNCTION],
            "tool_choice": choice,
            "chat_template_kwargs": {"color": "red"},
            "reasoning_effort": "none",
            "add_generation_prompt": False,
        }
        model = ServedModel(names=("m",), created=0, fingerprint="f", info=INFO, tokenizer=tokenizer)
        text = chat_prompt(parse_chat(json.dumps(body).encode()), model).prompt
        assert ("é" in text) == (choice == "required")
        ids = tokenizer.encode(text, add_special_tokens=False)
        arrived = incoming(body)
        params = TokenizedReader(tokenizer, 16)(read(arrived.body, CHAT_PATH), arrived, 0)
        tokenizer.close()
        assert params.num_prompt_tokens == len(ids)
        assert params.block_hashes == hash_blocks(prompt_key(None, None), np.array(ids, np.int32), 16)

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/messages", {"system": [{"type": "text", "text": LONG}], "messages": [turn("user", "hi")]}),
            ("/v1/messages/count_tokens", {"system": LONG, "messages": [turn("user", "hi")]}),
            ("/v1/responses", {"instructions": LONG, "input": "hi"}),
            ("/v1/responses", {"instructions": LONG, "input": [turn("user", [{"type": "input_text", "text": "hi"}])]}),
        ],
    )
    def test_other_apis_have_the_blocks_of_the_chat_to_which_engines_translate_them(
        self, reader, tokenizer, path, body
    ):
        data = json.dumps({"model": "m", "max_tokens": 3} | body).encode()
        arrived = Incoming(RequestHead(b"POST", path.encode(), [], {}), data, request_id="r")
        params = reader(read(data, path), arrived, 0)
        text = tokenizer.render_chat([turn("system", LONG), turn("user", "hi")])
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert params.num_prompt_tokens == len(ids)
        assert params.block_hashes == hash_blocks(prompt_key("m", None), np.array(ids, np.int32), 16)

    def test_a_message_that_cannot_be_translated_is_routed_by_its_length(self, reader):
        for content in ([{"type": "image"}], 5, "[" * 10):
            data = json.dumps({"messages": [turn("user", content)]}).encode()
            arrived = Incoming(RequestHead(b"POST", b"/v1/messages", [], {}), data, request_id="r")
            assert reader(read(data, CHAT_PATH), arrived, 0).block_hashes == b""

    def test_a_truncated_prompt_has_the_blocks_of_what_is_left(self, reader, tokenizer):
        ids = tokenizer.encode(LONG, add_special_tokens=True)
        for side, kept in ((None, ids[-40:]), ("left", ids[-40:]), ("right", ids[:40])):
            arrived = incoming({"prompt": LONG, "truncate_prompt_tokens": 40, "truncation_side": side, "model": "m"})
            params = reader(read(arrived.body, CHAT_PATH), arrived, 0)
            assert params.block_hashes == hash_blocks(prompt_key("m", None), np.array(kept, np.int32), 16)

    @pytest.mark.parametrize(
        "body",
        [
            {"prompt": [2**40]}, {"prompt": []}, {"prompt": [[]]}, {"prompt": {"a": 1}}, {"prompt": [1.5]},
            {"messages": [turn("user", [{"type": "image_url", "image_url": {"url": "x"}}])]}, {"messages": []},
            {"input": "x"}, b"x" * 100,
        ],
    )  # fmt: skip
    def test_what_has_no_tokens_here_is_routed_by_its_length(self, reader, body):
        arrived = incoming(body)
        params = reader(read(arrived.body, CHAT_PATH), arrived, 0)
        assert params.num_prompt_tokens >= 1
        assert params.block_hashes == b"" or body == {"messages": []}


def test_calls_and_results_of_tools_tell_prompts_apart():
    def body(result: str, city: str = "Ulm"):
        use = {"type": "tool_use", "id": "t", "name": "weather", "input": {"city": city}}
        return {
            "messages": [
                turn("user", LONG),
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, use]},
                turn("user", [{"type": "tool_result", "tool_use_id": "t", "content": result}]),
            ]
        }

    texts = {
        plain_text(read(json.dumps(each).encode(), CHAT_PATH)) for each in (body("a"), body("b"), body("a", "Bonn"))
    }
    assert len(texts) == 3
    assert shared_blocks(body("a" * 500), body("b" * 500)) > 10


def test_nothing_is_read_of_nothing():
    assert read(b"", CHAT_PATH) is NOTHING


def test_a_large_body_is_read_as_a_small_one():
    small = {"model": "m", "max_tokens": 7, "messages": [turn("system", LONG), turn("user", "hello")], "tools": [1]}
    padded = small | {"unknown": "x" * MAX_ELEMENTS}
    assert read(json.dumps(padded).encode(), CHAT_PATH) == read(json.dumps(small).encode(), CHAT_PATH)
    assert read(json.dumps({"model": "m", "prompt": "x" * MAX_ELEMENTS}).encode(), CHAT_PATH).model == "m"
    assert read(json.dumps({"messages": [1], "unknown": "x" * MAX_ELEMENTS}).encode(), CHAT_PATH) is NOTHING


def test_a_chat_of_too_many_elements_is_compared_as_it_is_spelt_and_keeps_its_model():
    body = {"model": "m", "messages": [turn("user", "x")] * MAX_ELEMENTS}
    params = read(json.dumps(body).encode(), CHAT_PATH)
    assert (params.model, params.messages) == ("m", None)
    assert plain_text(params) == json.dumps(body["messages"]).encode()
    assert shared_blocks(body, {"model": "m", "messages": [*body["messages"], turn("user", "y")]}) > 1000


def test_law_any_json_has_a_request_by_which_the_router_decides():
    rng = random.Random(3)
    for _ in range(4000):
        body = nasty_body(rng, rng.choice(sorted(BODIES)))
        made = request(body)
        assert made.num_prompt_tokens >= 1
        assert len(made.block_hashes) % HASH_BYTES == 0


def test_several_chats_are_read_as_the_first_one():
    chats = [[turn("system", LONG), turn("user", "hello")], [turn("user", "other")]]
    one, several = {"model": "m", "user": "u", "messages": chats[0]}, {"model": "m", "user": "u", "messages": chats}
    expected = read(json.dumps(one).encode(), CHAT_PATH)
    assert read(json.dumps(several).encode(), BATCH_PATH) == expected
    padded = several | {"unknown": "x" * MAX_ELEMENTS}
    assert read(json.dumps(padded).encode(), BATCH_PATH) == expected
    assert read(json.dumps({"model": "m", "messages": [[], []]}).encode(), BATCH_PATH).messages == []
    for wrong in ([[1]], [turn("user", "x")], [[turn("user", "x")], turn("user", "x")], "x"):
        assert read(json.dumps({"messages": wrong}).encode(), BATCH_PATH) is NOTHING
    assert read(json.dumps(several).encode(), CHAT_PATH) is NOTHING


def test_a_body_of_a_wrong_type_is_decoded_once(monkeypatch):
    bodies = []

    def decode(body: bytes) -> None:
        bodies.append(body)
        raise msgspec.ValidationError

    monkeypatch.setattr(request_body, "_decode", decode)
    monkeypatch.setattr(request_body, "_decode_but_messages", decode)
    assert read(b'{"messages": 1}', CHAT_PATH) is NOTHING
    assert len(bodies) == 1


def test_long_names_of_models_and_salts_are_not_kept():
    """The cache of hash keys has a bound in bytes, because clients choose the texts."""
    kept = request_body._cached_prompt_key
    kept.cache_clear()
    for number in range(20):
        assert prompt_key(f"{number}" * 1000, None) == hash_key(f"{number}" * 1000, None, None)
        assert prompt_key("m", f"{number}" * 1000) == hash_key("m", None, f"{number}" * 1000)
    assert kept.cache_info().currsize == 0
    assert prompt_key("m", "salt") == prompt_key("m", "salt") == hash_key("m", None, "salt")
    assert kept.cache_info()[:2] == (1, 1)
