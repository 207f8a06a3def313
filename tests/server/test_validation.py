"""What the API takes and refuses, body by body."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random

import pytest

from moestro.errors import PromptTooLongError, RequestError
from moestro.server.api.protocol import ChatFields, CompletionFields, GenerationFields
from moestro.server.api.request_fields import IN_CHAT, IN_COMPLETIONS, WITHOUT_EFFECT, ignored_warning
from moestro.server.api.validation import parse_chat, parse_completion

DEEP = b'{"prompt": "x", "extra": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def completion(**fields):
    return parse_completion(json.dumps({"prompt": "x"} | fields).encode())


def chat(**fields):
    return parse_chat(json.dumps({"messages": [{"role": "user", "content": "x"}]} | fields).encode())


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"\xef\xbb\xbf{}", "invalid_json"),
        (b'{"prompt": "\xff"}', "invalid_json"),
        (b'{"prompt": "x", "unknown": "\xff"}', "invalid_json"),
        (b'{"prompt": "\\ud800"}', "invalid_json"),
        (b'{"prompt": "x", "temperature": NaN}', "invalid_json"),
        (b'{"prompt": "x", "temperature": 1e999}', "invalid_type"),
        (DEEP, "invalid_json"),
        (b"[]", "invalid_type"),
        (b"null", "invalid_type"),
        (b'"x"', "invalid_type"),
        (b"{}", "invalid_type"),
    ],
)
def test_a_body_that_is_no_request_is_refused(body, code):
    for parse in (parse_completion, parse_chat):
        with pytest.raises(RequestError) as caught:
            parse(body)
        if parse is parse_completion or code == "invalid_json":
            assert caught.value.code == code


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("prompt", value) for value in (None, "", [], [[]], [[], [1]], ["a", ""], ["a", [1]], [1, "a"], ["a", 1])],
        *[("prompt", value) for value in (1, True, [1.5], [True], {}, ["x"] * 1025)],
        *[("max_tokens", value) for value in (0, -1, 2**63, "16", 16.5, True)],
        *[("temperature", value) for value in (-0.1, 2.1, "1", True)],
        *[("top_p", value) for value in (0, 1.1, -1)],
        *[("top_k", value) for value in (-5, 1.5, 2**40)],
        *[("seed", value) for value in (2**63, -(2**63) - 1, "1", 1.5)],
        *[("stop", value) for value in ("", [""], ["a"] * 65, 1, [1], ["a" * 1025])],
        *[("stop_token_ids", value) for value in ("a", [1.5], list(range(2000)))],
        *[("n", value) for value in (0, 129, 16384, 2**31, 1.5)],
        *[("best_of", value) for value in (0, 2)],
        *[("min_tokens", value) for value in (-1, 17, "1", 1.5)],
        *[("min_p", value) for value in (-0.1, 1.1, 2, "x")],
        *[("presence_penalty", value) for value in (-2.1, 2.1, 1e308)],
        *[("frequency_penalty", value) for value in (-2.1, 2.1, "1")],
        *[("repetition_penalty", value) for value in (0, -1, 1e-300, 1e308)],
        *[("logprobs", value) for value in (-2, -1, 21, 10**9, True, 1.5)],
        *[("prompt_logprobs", value) for value in (-2, 21)],
        *[("logit_bias", {key: 1}) for key in ("abc", "-1", "1.5", "01", " 1", "1_0", "\u0661", "", "9" * 20)],
        *[("logit_bias", {"1": value}) for value in (101, -100.5, 1e9, "x")],
        ("logit_bias", {str(i): 1 for i in range(301)}),
        ("logit_bias", [1]),
        *[("service_class", value) for value in ("", "LS", "vip", 1)],
        ("echo", "yes"),
        *[("cache_salt", value) for value in ("", "a" * 1025, [])],
        *[("priority", value) for value in (2**63, "high")],
        *[("stream", value) for value in ("yes", 1)],
        ("stream_options", {"include_usage": True}),
        ("ignore_eos", "yes"),
        ("user", 1),
        ("user", "x" * 1025),
        ("model", 1),
        *[
            ("suffix", "x"),
            ("allowed_token_ids", []),
            ("allowed_token_ids", ["a"]),
            ("bad_words", [" "]),
            ("bad_words", ["x"] * 257),
            ("bad_words", "x"),
        ],
        *[
            ("use_beam_search", True),
            ("prompt_embeds", "x"),
        ],
    ],
)
def test_a_completion_field_out_of_bounds_is_refused_by_name(field, value):
    with pytest.raises(RequestError) as caught:
        completion(**{field: value})
    assert caught.value.http_status == 400
    assert caught.value.error_type == "invalid_request_error"
    assert caught.value.param is not None
    assert caught.value.param.split("[")[0] == field
    assert field in caught.value.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[
            ("messages", value)
            for value in ([], None, "x", [{}], [{"role": "user"}], [{"role": "pirate", "content": "x"}])
        ],
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        ("messages", [{"role": "user", "content": 3}]),
        ("messages", [{"role": "tool", "content": None}]),
        ("max_completion_tokens", 0),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("n", 0),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("logprobs", 3),
        ("top_logprobs", 3),
        ("echo", True),
        ("chat_template_kwargs", {"tokenize": True}),
        ("reasoning_effort", "huge"),
        ("verbosity", "verbose"),
    ],
)
def test_a_chat_field_out_of_bounds_is_refused_by_name(field, value):
    with pytest.raises(RequestError) as caught:
        chat(**{field: value})
    assert caught.value.param is not None
    assert caught.value.param.split("[")[0] == field


def test_law_any_json_is_taken_or_refused_and_nothing_else():
    rng = random.Random(0)
    names = ["prompt", "messages", *GenerationFields.__struct_fields__, *IN_COMPLETIONS, *IN_CHAT, "unknown_field"]

    def value(depth: int = 0):
        kinds = [None, True, 0, -1, 1, 2**31, 2**64, 10**30, 0.5, -1e308, "", "x", "\x00\u202e", "user"]
        if depth < 3 and rng.random() < 0.4:
            items = [value(depth + 1) for _ in range(rng.randrange(4))]
            keys = ["role", "content", "type", "text", "include_usage", "name", "x"]
            return items if rng.random() < 0.5 else {rng.choice(keys): item for item in items}
        return rng.choice(kinds)

    for _ in range(5000):
        fields = {rng.choice(names): value() for _ in range(rng.randrange(4))}
        for parse, least in (
            (parse_completion, {"prompt": "x"}),
            (parse_chat, {"messages": [{"role": "user", "content": "x"}]}),
        ):
            with contextlib.suppress(RequestError):
                assert parse(json.dumps(least | fields).encode()).options.n >= 1


def test_neutral_values_are_accepted_also_of_what_is_not_supported():
    neutral = {
        "logprobs": None, "echo": False, "best_of": 1, "suffix": None, "presence_penalty": 0.0, "frequency_penalty": 0,
        "logit_bias": {}, "min_p": None, "min_tokens": 0, "repetition_penalty": None, "prompt_logprobs": None,
        "response_format": {"type": "text"}, "service_class": "ls", "n": 1, "stop": None, "seed": None, "user": "",
        "stream": False, "temperature": None, "cache_salt": None,
    }  # fmt: skip
    assert completion(**neutral) == completion()
    assert chat(logprobs=False, top_logprobs=0, tools=[], tool_choice="auto") == chat()


def test_what_says_nothing_about_the_answer_is_accepted():
    fields = {"metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "x"}
    assert completion(**fields) == completion()
    assert chat(**fields) == chat()


def test_no_tokens_are_allowed_with_an_echo_alone():
    assert completion(max_tokens=0, echo=True).options.max_tokens == 0
    with pytest.raises(RequestError, match="max_tokens must be between 1 and"):
        completion(max_tokens=0)


def test_ids_that_cannot_fit_are_refused_by_their_number_alone():
    for prompt in ([1] * 9, [[1], [2] * 9], [1, *["x"] * 8]):
        with pytest.raises(PromptTooLongError):
            parse_completion(json.dumps({"prompt": prompt}).encode(), max_prompt_ids=8)
    assert parse_completion(b'{"prompt": [[1, 2], [3]]}', max_prompt_ids=2).prompts == ((1, 2), (3,))
    assert len(parse_completion(b'{"prompt": ["a", "b", "c"]}', max_prompt_ids=2).prompts) == 3


@pytest.mark.parametrize("item", ["1", "[1]", "[[]]", "[]", '[1,"a"]'])
def test_a_swarm_of_ids_or_lists_is_refused_without_decoding_it(item, monkeypatch):
    monkeypatch.setattr("moestro.server.api.request_fields.decode_completion._decoder", None)  # it would be computed
    with pytest.raises(RequestError) as refused:
        parse_completion(f'{{"prompt": [{", ".join([item] * 5000)}]}}'.encode(), max_prompt_ids=1000)
    assert refused.value.param == "prompt"


def test_best_of_may_say_what_n_says():
    assert completion(n=3, best_of=3).options.n == 3
    with pytest.raises(RequestError, match=r"best_of must equal n \(3\)"):
        completion(n=3, best_of=5)


def test_prompts_times_n_are_bounded():
    assert completion(prompt=["x"] * 8, n=128).options.n == 128
    with pytest.raises(RequestError, match="n times the number of prompts must be 1024 at most, got 1152"):
        completion(prompt=["x"] * 9, n=128)


def test_prompt_logprobs_and_a_stream_exclude_each_other():
    with pytest.raises(RequestError, match="prompt_logprobs is not allowed with stream: true"):
        completion(prompt_logprobs=1, stream=True)
    assert completion(echo=True, logprobs=1, stream=True).options.logprobs == 1


def test_logprobs_are_spelt_differently_in_the_two_kinds():
    assert [completion(logprobs=k).options.logprobs for k in (None, 0, 20)] == [None, 0, 20]
    assert chat(logprobs=True).options.logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).options.logprobs == 20
    assert chat(logprobs=False, top_logprobs=0).options.logprobs is None


def test_unknown_fields_are_ignored_and_reported_in_the_bodys_order():
    options = completion(frobnicate=1, max_tokens=3, another=None, metadata={}).options
    assert options.unknown_fields == ("frobnicate", "another")
    assert dataclasses.replace(options, unknown_fields=()) == completion(max_tokens=3).options


def test_the_header_of_ignored_fields_is_short_and_printable():
    assert ignored_warning(()) == {}
    assert ignored_warning(("a", "b")) == {"Warning": '299 moestro "fields were ignored: a, b"'}
    names = ('x"\r\n\\\u00e9' + "y" * 100, *(f"f{i}" for i in range(20)))
    header = ignored_warning(completion(**dict.fromkeys(names, 1)).options.unknown_fields)["Warning"]
    assert header.startswith('299 moestro "fields were ignored: x?????' + "y" * 42 + "..." + "y" * 49 + ", f0, ")
    assert header.endswith('f14, and 5 more"')
    assert header.isascii()
    assert header.isprintable()


def test_the_first_refused_field_of_the_body_is_named_whatever_the_hash_seed():
    fields = {"typical_p": 0.9, "grammar": "root ::= x", "thinking": True, "stop_regex": "a", "suffix": "x"}
    for _ in range(2):
        fields = dict(reversed(fields.items()))
        with pytest.raises(RequestError) as caught:
            completion(**fields)
        assert caught.value.param == next(iter(fields))


@pytest.mark.parametrize(
    ("field", "value", "spelt"),
    [
        ("grammar", "root ::= x", '"root ::= x"'),
        ("custom_logit_processor", "x", '"x"'),
        ("stop_regex", ["a+"], '["a+"]'),
        ("typical_p", 0.5, "0.5"),
        ("repeat_penalty", 1.1, "1.1"),
        ("thinking", {"type": "enabled", "a": None}, '{"type": "enabled", "a": null}'),
        ("enable_thinking", False, "false"),
        ("use_beam_search", True, "true"),
        ("max_new_tokens", 5, "5"),
    ],
)
def test_fields_of_other_servers_that_change_answers_are_refused_with_their_json(field, value, spelt):
    for parse in (completion, chat):
        with pytest.raises(RequestError) as caught:
            parse(**{field: value})
        assert caught.value.param == field
        assert caught.value.code == "unsupported_parameter"
        assert (
            caught.value.message == f"{field} is not supported yet, and {spelt} would change the answer. Leave it out."
        )


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("functions", [{"name": "f"}], "Send tools."),
        ("function_call", {"name": "f"}, "Send tool_choice."),
    ],
)
def test_the_older_form_of_tools_is_refused_with_the_newer_one(field, value, remedy):
    with pytest.raises(RequestError, match=f"would change the answer. {remedy}$"):
        chat(**{field: value})


def test_a_field_is_read_or_refused_or_has_no_effect_and_never_two_of_them():
    assert not {*CompletionFields.__struct_fields__} & IN_COMPLETIONS.keys()
    assert not {*ChatFields.__struct_fields__} & IN_CHAT.keys()
    assert not WITHOUT_EFFECT & (IN_COMPLETIONS.keys() | IN_CHAT.keys() | {*CompletionFields.__struct_fields__})


def test_a_field_of_chats_is_refused_in_a_completion_and_the_other_way_round():
    for field, value in (("messages", []), ("max_completion_tokens", 3), ("tools", [{}])):
        with pytest.raises(RequestError, match=field):
            completion(**{field: value})
    with pytest.raises(RequestError, match="prompt is not supported"):
        chat(prompt="x")


@pytest.mark.parametrize("value", ["", "a b", "a" * 129, "\n", "é"])
def test_a_request_id_is_short_and_printable(value):
    with pytest.raises(RequestError) as caught:
        completion(request_id=value)
    assert caught.value.param == "request_id"


@pytest.mark.parametrize("value", [0, -2, 2**31, 1.5, True])
def test_a_prompt_is_truncated_to_some_tokens_or_to_all_that_fit(value):
    with pytest.raises(RequestError) as caught:
        completion(truncate_prompt_tokens=value)
    assert caught.value.param == "truncate_prompt_tokens"
    assert completion(truncate_prompt_tokens=-1).options.truncate_prompt_tokens == -1


def test_a_prompt_is_a_text_or_ids_or_several_of_either():
    assert completion(prompt="a").prompts == ("a",)
    assert completion(prompt=["a", "b"]).prompts == ("a", "b")
    assert completion(prompt=[1, 2]).prompts == ((1, 2),)
    assert completion(prompt=[[1], [2, 3]]).prompts == ((1,), (2, 3))


def test_defaults_are_the_apis():
    options = completion().options
    assert (options.max_tokens, options.min_tokens, options.n, options.logit_bias) == (16, 0, 1, ())
    given = {"presence_penalty": 0, "frequency_penalty": 0}
    assert options.sampling == given, "the others are the checkpoint's own, if it has some"
    assert (options.logprobs, options.prompt_logprobs, options.service_class) == (None, None, "ls")
    assert (options.seed, options.stop, options.stream, options.priority) == (None, (), False, 0)
    assert chat().options.max_tokens is None


def test_values_mean_what_they_mean_elsewhere():
    assert completion(top_k=-1).options.sampling["top_k"] == 0
    assert completion(seed=-1).options.seed == 2**64 - 1
    assert completion(stop="a").options.stop == ("a",)
    assert chat(max_tokens=5).options.max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=7).options.max_tokens == 7
    options = completion(stream=True, stream_options={"include_usage": True, "whatever": 1}).options
    assert (options.include_usage, options.continuous_usage) == (True, False)


def test_an_editor_may_send_dozens_of_stop_strings():
    stops = [f"stop {i}" for i in range(65)]
    assert completion(stop=stops[:64]).options.stop == tuple(stops[:64])
    with pytest.raises(RequestError, match="stop may hold 64 strings at most, got 65"):
        completion(stop=stops)


def test_text_parts_of_a_message_are_joined_by_lines():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages == ({"role": "user", "content": "a\nb"},)


def test_a_message_says_what_was_given_and_what_is_allowed():
    with pytest.raises(RequestError, match=r"temperature must be between 0 and 2, got 3"):
        completion(temperature=3)
    with pytest.raises(RequestError, match=r"max_tokens: Expected `int \| null`, got `str`"):
        completion(max_tokens="16")
    with pytest.raises(RequestError, match=r"suffix is not supported yet"):
        completion(suffix="x")
    with pytest.raises(RequestError, match=r"logit_bias values must be between -100 and 100, got 101"):
        completion(logit_bias={"3": 101})
