"""The HTTP API, against fake ranks that repeat the prompt."""

from __future__ import annotations

import http.client
import json

import pytest
from support.fake_rank import FAIL_ONE, REFUSE
from support.running import Running, call, chat, complete, is_idle, open_stream, read_to_end, wait_until


def error_of(reply) -> dict[str, object]:
    """The error of a refusal, whose form is OpenAI's."""
    assert reply.headers["content-type"].startswith("application/json")
    assert reply.json.keys() == {"error"}
    error = reply.json["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


# --- answers


def test_a_completion_is_whole(fake):
    reply = complete(fake, max_tokens=4, user="me")
    answer = reply.json
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["model"] == "moestro-demo"
    assert answer["system_fingerprint"].startswith("fp_")
    [choice] = answer["choices"]
    assert "def f(x):".startswith(choice.pop("text"))
    assert {name: value for name, value in choice.items() if value is not None} == {
        "index": 0,
        "finish_reason": "length",
    }
    assert choice.keys() >= {"logprobs", "stop_reason", "prompt_logprobs", "prompt_token_ids", "token_ids"}
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["usage"]["total_tokens"] == 4 + answer["usage"]["prompt_tokens"]


def test_a_chat_answer_is_whole(fake):
    answer = chat(fake, max_tokens=4).json
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    [choice] = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"


def test_a_stream_joins_to_the_whole_answer(fake):
    whole = complete(fake, prompt="naïve 😀 text", max_tokens=40).json
    reply = complete(fake, prompt="naïve 😀 text", max_tokens=40, stream=True)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, done = reply.events
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert not any("usage" in chunk for chunk in chunks)
    assert not any("\ufffd" in chunk["choices"][0]["text"] for chunk in chunks[:-1])


def test_tokens_that_show_nothing_yet_have_a_chunk_too_so_that_a_client_sees_when_its_answer_began(fake):
    text = complete(fake, max_tokens=4).json["choices"][0]["text"]
    held_back = f"{text[:-1]}☃"
    *chunks, _ = complete(fake, max_tokens=4, stop=[held_back], stream=True).events
    assert chunks[0]["choices"][0]["text"] == ""
    assert chunks[0]["choices"][0]["finish_reason"] is None
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    opening, first, *_ = chat(fake, max_tokens=4, stop=[held_back], stream=True).events
    assert opening["choices"][0]["delta"]["role"] == "assistant"
    assert first["choices"][0]["delta"] == {"content": "", "reasoning": None}


def test_a_chat_stream_begins_with_the_role_and_may_end_with_the_usage(fake):
    first, *_, last, done = chat(
        fake, max_tokens=9, ignore_eos=True, stream=True, stream_options={"include_usage": True}
    ).events
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "", "reasoning": None}
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 9
    assert done == "[DONE]"


def test_usage_in_every_chunk_counts_up(fake):
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, _ = complete(fake, max_tokens=5, stream=True, stream_options=options).events
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 5]
    assert last["usage"]["completion_tokens"] == 5


def test_several_prompts_give_several_choices_in_order(fake):
    prompts = ["alpha beta gamma", "one two three", "x = y + z"]
    alone = [complete(fake, prompt=prompt, max_tokens=3).json["choices"][0]["text"] for prompt in prompts]
    answer = complete(fake, prompt=prompts, max_tokens=3).json
    assert [choice["text"] for choice in answer["choices"]] == alone
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == 9
    texts = ["", "", ""]
    for chunk in complete(fake, prompt=prompts, max_tokens=3, stream=True).events[:-1]:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == alone


def test_token_ids_are_a_prompt_like_text(fake, tokenizer):
    ids = tokenizer.encode("def f(x):", add_special_tokens=True)
    by_ids, by_text = complete(fake, prompt=ids, max_tokens=5).json, complete(fake, max_tokens=5).json
    assert by_ids["choices"] == by_text["choices"]
    assert by_ids["usage"] == by_text["usage"]


def test_a_stop_string_cuts_and_ends_the_sequence(fake):
    for stream in (False, True):
        reply = complete(fake, prompt="one two three four", stop=["o th", "never"], max_tokens=500, stream=stream)
        chunks = reply.events[:-1] if stream else [reply.json]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "one tw"
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    wait_until(lambda: is_idle(fake))


def test_what_a_stop_string_hides_is_counted(fake, tokenizer):
    answer = complete(fake, prompt="one two three four", stop=" three", max_tokens=500).json
    assert answer["usage"]["completion_tokens"] == len(tokenizer.encode("one two three", add_special_tokens=True))


def test_a_stop_token_ends_the_text_before_it(fake, tokenizer):
    ids = tokenizer.encode("one two three", add_special_tokens=True)
    answer = complete(fake, prompt=ids, stop_token_ids=[ids[-1]], max_tokens=100).json
    assert "one two three".startswith(answer["choices"][0]["text"])
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(ids)


def test_the_models_end_token_stops_unless_ignored(fake):
    assert complete(fake, prompt=[40, 41, 2, 42], max_tokens=9).json["usage"]["completion_tokens"] == 3
    assert complete(fake, prompt=[40, 41, 2, 42], max_tokens=9, ignore_eos=True).json["usage"]["completion_tokens"] == 9


def test_n_choices_are_prompt_major_and_their_prompt_counts_once(fake, tokenizer):
    prompts = ["alpha beta gamma", "one two three"]
    alone = [complete(fake, prompt=prompt, max_tokens=3).json["choices"][0]["text"] for prompt in prompts]
    answer = complete(fake, prompt=prompts, max_tokens=3, n=2).json
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == [alone[0], alone[0], alone[1], alone[1]]
    num_prompt = sum(len(tokenizer.encode(prompt, add_special_tokens=True)) for prompt in prompts)
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (num_prompt, 12)


def test_each_choice_of_a_chat_stream_opens_with_its_role(fake):
    chunks = chat(fake, max_tokens=4, n=3, stream=True, ignore_eos=True).events[:-1]
    opening = [(chunk["choices"][0]["index"], chunk["choices"][0]["delta"].get("role")) for chunk in chunks[:3]]
    assert opening == [(0, "assistant"), (1, "assistant"), (2, "assistant")]
    ends = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert sorted(end["index"] for end in ends) == [0, 1, 2]
    whole = chat(fake, max_tokens=4, n=3, ignore_eos=True).json["choices"]
    assert [choice["index"] for choice in whole] == [0, 1, 2]


# --- log probabilities and echo


def joined_logprobs(chunks) -> dict[str, list]:
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [entry for part in parts for entry in part[name]] for name in names}


def test_logprobs_of_a_completion_have_an_entry_for_every_token(fake):
    answer = complete(fake, max_tokens=5, logprobs=2).json
    [choice] = answer["choices"]
    logprobs = choice["logprobs"]
    assert logprobs.keys() == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["token_logprobs"] == [-1.5] * 5
    starts = [len("".join(logprobs["tokens"][:i])) for i in range(5)]
    assert logprobs["text_offset"] == starts
    for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert list(top.values()) == [-0.5, -1.0, -1.5], "two alternatives, and the token that came"
        assert top[token] == -1.5
    own = complete(fake, max_tokens=5, logprobs=0).json["choices"][0]["logprobs"]["top_logprobs"]
    assert own == [{token: -1.5} for token in logprobs["tokens"]]


def test_streamed_logprobs_join_to_the_whole_ones(fake):
    params = {"prompt": "naïve 😀 text", "max_tokens": 30, "logprobs": 1, "stop": ["te"]}
    whole = complete(fake, **params).json["choices"][0]["logprobs"]
    chunks = complete(fake, **params, stream=True).events[:-1]
    assert joined_logprobs(chunks) == whole
    assert len(whole["tokens"]) == complete(fake, **params).json["usage"]["completion_tokens"]


def test_a_token_that_is_half_a_character_is_shown_by_its_bytes(fake):
    params = {"messages": [{"role": "user", "content": "😀"}], "logprobs": True, "max_tokens": 50}
    content = call(fake, "POST", "/v1/chat/completions", params).json["choices"][0]["logprobs"]["content"]
    assert "😀".encode() in bytes(byte for entry in content for byte in entry["bytes"])
    for entry in content:
        if not entry["token"].startswith("bytes:"):
            assert bytes(entry["bytes"]).decode() == entry["token"]


def test_logprobs_of_a_chat(fake):
    [choice] = chat(fake, max_tokens=4, ignore_eos=True, logprobs=True, top_logprobs=3).json["choices"]
    assert choice["logprobs"]["refusal"] is None
    content = choice["logprobs"]["content"]
    assert len(content) == 4
    for entry in content:
        assert entry.keys() == {"token", "logprob", "bytes", "top_logprobs"}
        assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, -1.0, -1.5]
        own = {"token": entry["token"], "logprob": -1.5, "bytes": entry["bytes"]}
        assert entry["top_logprobs"][2] == own
    chunks = chat(fake, max_tokens=4, ignore_eos=True, logprobs=True, top_logprobs=3, stream=True).events[1:-1]
    assert [entry for chunk in chunks for entry in chunk["choices"][0]["logprobs"]["content"]] == content
    bare = chat(fake, max_tokens=4, ignore_eos=True, logprobs=True).json["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in bare] == [[]] * 4


def test_an_echo_stands_in_front_also_of_a_stream(fake):
    plain = complete(fake, max_tokens=5).json["choices"][0]["text"]
    assert complete(fake, max_tokens=5, echo=True).json["choices"][0]["text"] == "def f(x):" + plain
    chunks = complete(fake, max_tokens=5, echo=True, stream=True).events[:-1]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "def f(x):" + plain


def test_an_echo_is_not_searched_for_stop_strings(fake):
    [choice] = complete(fake, prompt="one two", echo=True, stop=" two", max_tokens=99).json["choices"]
    assert choice["text"] == "one twoone"
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("max_tokens", [0, 1, 7])
@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_with_logprobs_scores_the_prompt_first(fake, tokenizer, max_tokens, stream):
    params = {
        "prompt": "naïve 😀 text",
        "echo": True,
        "logprobs": 1,
        "max_tokens": max_tokens,
        "stream": stream,
    }
    reply = complete(fake, **params)
    chunks = reply.events[:-1] if stream else [reply.json]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    logprobs, num_prompt = joined_logprobs(chunks), len(tokenizer.encode("naïve 😀 text", add_special_tokens=True))
    assert {len(entries) for entries in logprobs.values()} == {num_prompt + max_tokens}
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    assert set(logprobs["token_logprobs"][1:]) <= {-1.5}
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert token.startswith("bytes:") or text[offset:].startswith(token)
    if not stream:
        assert reply.json["usage"]["completion_tokens"] == max_tokens


def test_prompts_are_scored_as_lm_eval_reads_them(fake, tokenizer):
    """Token ids in, one choice per prompt in order, the prompt's own logprobs between its context and the new token."""
    prompts = [tokenizer.encode(text, add_special_tokens=True) for text in ("one two three", "x = y + z", "z")]
    params = {"max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1234}
    choices = complete(fake, prompt=prompts, **params).json["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    for choice, ids in zip(choices, prompts, strict=True):
        context = 1
        scores = choice["logprobs"]["token_logprobs"][context:-1]
        assert scores == [-1.5] * (len(ids) - 1)
        likeliest = [max(top, key=top.get) for top in choice["logprobs"]["top_logprobs"][context:-1]]
        pairs = zip(likeliest, choice["logprobs"]["tokens"][context:-1], strict=True)
        assert all(best != token for best, token in pairs), "the fake's tokens are never the likeliest"


def test_prompt_logprobs_are_vllms(fake, tokenizer):
    ids = tokenizer.encode("one two three", add_special_tokens=True)
    [choice] = complete(fake, prompt=ids, prompt_logprobs=3, max_tokens=1).json["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    assert choice["logprobs"] is None
    for token_id, found in zip(ids[1:], rest, strict=True):
        assert found[str(token_id)]["logprob"] == -1.5
        assert [found[str(token_id - 2 + i)]["rank"] for i in range(3)] == [1, 2, 3]
        assert found[str(token_id)].keys() == {"logprob", "rank", "decoded_token"}
    answer = chat(fake, prompt_logprobs=0, max_tokens=1).json
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert chat(fake, max_tokens=1).json["prompt_logprobs"] is None


def test_a_stop_string_is_not_looked_for_before_min_tokens(fake, tokenizer):
    text = "one two three four "
    num_tokens = len(tokenizer.encode(text, add_special_tokens=True))
    params = {"prompt": tokenizer.encode(text, add_special_tokens=True), "stop": " three", "max_tokens": 500}
    assert complete(fake, **params).json["choices"][0]["text"] == "one two"
    late = complete(fake, **params, min_tokens=num_tokens).json["choices"][0]["text"]
    assert late.count(" three") == 1
    assert late.endswith(" two")


# --- refusals


def test_an_unknown_model_is_404_in_the_words_that_clients_look_for(fake):
    for reply in (complete(fake, model="x"), chat(fake, model="x"), call(fake, "GET", "/v1/models/x")):
        assert reply.status == 404
        assert error_of(reply) == {
            "message": "The model `x` does not exist.",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
    assert len(complete(fake, model="y" * 10_000).body) < 500


WRONG_BASES = {
    "/chat/completions": "base URL lacks /v1: add it at the end.",
    "/messages": "base URL lacks /v1: add it at the end.",
    "/models": "base URL lacks /v1: add it at the end.",
    "/v1/v1/messages": "adds /v1 itself: leave it out of the base URL.",
}


@pytest.mark.parametrize("path", WRONG_BASES)
def test_a_wrong_base_url_is_answered_with_what_to_do(fake, path):
    reply = call(fake, "POST", path)
    assert reply.status == 404
    assert error_of(reply)["message"].endswith(WRONG_BASES[path])
    assert "base URL" not in error_of(call(fake, "POST", "/v2/chat/completions"))["message"]


def test_unknown_paths_and_methods_are_refused_in_the_same_form(fake):
    reply = call(fake, "GET", "/v1/nothing")
    assert (reply.status, error_of(reply)["code"]) == (404, "not_found")
    reply = call(fake, "GET", "/v1/completions")
    assert (reply.status, error_of(reply)["code"], reply.headers["allow"]) == (405, "method_not_allowed", "POST")


def test_a_body_of_another_type_or_size_is_refused(fake):
    reply = call(fake, "POST", "/v1/completions", b"{}", Content_Type="text/plain")
    assert (reply.status, error_of(reply)["code"]) == (415, "unsupported_media_type")
    connection = http.client.HTTPConnection(*fake.address)
    connection.request(
        "POST", "/v1/completions", iter([b" " * (1 << 20)] * 33), {"Content-Type": "application/json"},
        encode_chunked=True,
    )  # fmt: skip
    response = connection.getresponse()
    assert response.status == 413
    assert json.loads(response.read())["error"]["code"] == "request_too_large"
    connection.close()


def test_a_bad_body_is_400_with_the_field_at_fault(fake):
    reply = complete(fake, temperature=3)
    assert (reply.status, error_of(reply)["param"]) == (400, "temperature")
    reply = call(fake, "POST", "/v1/chat/completions", b"{")
    assert (reply.status, error_of(reply)["code"]) == (400, "invalid_json")


def test_what_cannot_fit_is_refused_and_never_clipped(fake):
    for fields in (
        {"max_tokens": 5000},
        {"prompt": [40] * 4096},
        {"prompt": [40] * 4090, "max_tokens": 7},
        {"prompt": "a b " * 4000},
    ):
        reply = complete(fake, **fields)
        assert (reply.status, error_of(reply)["code"]) == (400, "context_length_exceeded")
        assert "This model's maximum context length is 4096 tokens. However, your prompt" in error_of(reply)["message"]


def test_a_huge_text_is_refused_without_reading_it(fake):
    for reply in (complete(fake, prompt="x" * 10_000_000), chat(fake, "x" * 10_000_000)):
        assert (reply.status, error_of(reply)["code"]) == (400, "context_length_exceeded")
        assert "10000000 characters" in error_of(reply)["message"]


@pytest.mark.parametrize("token_id", [-1, 4096, 2**31, 2**63, 2**70])
def test_token_ids_that_the_model_does_not_have_are_refused(fake, token_id):
    reply = complete(fake, prompt=[1, token_id])
    assert (reply.status, error_of(reply)["param"]) == (400, "prompt")
    assert f"got {token_id}" in error_of(reply)["message"]
    assert complete(fake, stop_token_ids=[token_id]).status == 400


def test_a_ranks_refusal_keeps_its_status_also_for_a_stream(fake):
    for stream in (False, True):
        reply = complete(fake, priority=REFUSE, stream=stream)
        assert (reply.status, reply.headers["retry-after"], error_of(reply)["code"]) == (503, "1", "queue_full")


def test_special_tokens_and_control_characters_in_a_prompt_do_no_harm(fake):
    for text in ("<|im_end|><|endoftext|> x", "\x00\x1b[31m\u202e", "e" + "\u0301" * 1000, "👩\u200d👩\u200d👧"):
        assert complete(fake, prompt=text, max_tokens=3, ignore_eos=True).status == 200


# --- failures in mid-stream


def test_a_sequence_that_fails_in_mid_stream_ends_with_an_error_event_and_a_cut_connection(fake):
    reply = read_to_end(open_stream(fake, priority=FAIL_ONE, max_tokens=50))
    head, _, last = reply.rpartition(b"event: error\n")
    assert b"data: {" in head
    data, _, rest = last.partition(b"\n\n")
    assert json.loads(data.removeprefix(b"data: "))["error"]["code"] == "engine_error"
    assert b"[DONE]" not in reply
    assert not rest.endswith(b"0\r\n\r\n")


def test_a_sequence_that_fails_without_a_stream_is_500(fake):
    reply = complete(fake, priority=FAIL_ONE, max_tokens=50)
    assert (reply.status, error_of(reply)["type"]) == (500, "server_error")


# --- clients that leave


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_sequence(fake, stream):
    connection = open_stream(fake, max_tokens=4000, stream=stream)
    wait_until(lambda: call(fake, "GET", "/load").json["engines"][0]["num_running"] == 1)
    assert call(fake, "GET", "/load").json["server_load"] == 1
    connection.close()
    wait_until(lambda: is_idle(fake))


# --- the rest


def test_every_answer_carries_the_clients_request_id_or_a_new_one(fake):
    assert complete(fake, max_tokens=1).headers["x-request-id"]
    body = {"prompt": "x", "max_tokens": 1, "stream": True}
    for path, content in (("/v1/completions", body), ("/v1/completions", {}), ("/nothing", {})):
        reply = call(fake, "POST", path, content, X_Request_Id="mine-7")
        assert reply.headers["x-request-id"] == "mine-7"
    assert call(fake, "GET", "/health", X_Request_Id="x" * 200).headers["x-request-id"] != "x" * 200


def test_models_version_and_health(fake):
    listing = call(fake, "GET", "/v1/models").json
    assert listing["object"] == "list"
    [card] = listing["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("moestro-demo", "model", 4096)
    assert call(fake, "GET", "/v1/models/moestro-demo").json == card
    assert call(fake, "GET", "/version").json["version"]
    for path in ("/health", "/ping"):
        assert (call(fake, "GET", path).status, call(fake, "GET", path).body) == (200, b"")


def test_with_keys_only_probes_enter_without(fake_command, tmp_path):
    server = Running((*fake_command, "--api-key", "s3cret", "other"), tmp_path)
    try:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "s3cret"},
            {"Authorization": "Bearer"},
        ):
            for path in ("/v1/models", "/load", "/version", "/nothing"):
                reply = call(server, "GET", path, **headers)
                assert (reply.status, error_of(reply)["code"]) == (401, "invalid_api_key")
                assert reply.headers["www-authenticate"] == "Bearer"
        for value in ("Bearer s3cret", "bearer other"):
            assert call(server, "GET", "/v1/models", Authorization=value).status == 200
        assert call(server, "GET", "/health").status == 200
        assert "s3cret" not in server.text
    finally:
        server.kill()
