"""Structured output: the fields that ask for it, and answers of the demo model, which end by themselves."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Semaphore

import jsonschema
import pytest
from support.running import Running, chat, complete, metrics, wait_until

from moestro.core.request import FinishReason, Grammar
from moestro.errors import GrammarTimeoutError, RequestError
from moestro.grammar.host import CHECK, MAX_TRIES, TRY, GrammarVerdict
from moestro.server.api.chat_fields import (
    MAX_GRAMMAR_BYTES,
    MAX_WAITING_CHECKS,
    MAX_WAITING_TRIES,
    GrammarGate,
    RequestedGrammar,
)
from moestro.server.api.generation import _failure
from moestro.server.api.validation import parse_chat, parse_completion

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"enum": ["small", "large"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "size", "count", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": SCHEMA}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))


# --- fields ---------------------------------------------------------------------------------------------------------


def params(**fields: object):
    found = parse_completion(json.dumps({"prompt": "x"} | fields).encode()).options.grammar
    in_chat = parse_chat(json.dumps({"messages": [{"role": "user", "content": "x"}]} | fields).encode())
    assert in_chat.options.grammar == found
    return None if found is None else (found.grammar, found.param)


@pytest.mark.parametrize(
    ("fields", "grammar", "param"),
    [
        ({"response_format": {"type": "json_object"}}, Grammar("json_object"), "response_format"),
        ({"response_format": FORMAT}, Grammar("json_schema", TEXT), "response_format.json_schema.schema"),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", TEXT), "structured_outputs.json"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, Grammar("json_schema", TEXT), "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+"), "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a", "é"]}}, Grammar("choice", '["a","é"]'), "structured_outputs.choice"),
        (
            {"structured_outputs": {"grammar": "root ::= x"}},
            Grammar("lark", "root ::= x"),
            "structured_outputs.grammar",
        ),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_object"), "structured_outputs.json_object"),
        ({"guided_json": SCHEMA}, Grammar("json_schema", TEXT), "guided_json"),
        ({"guided_regex": "a+"}, Grammar("regex", "a+"), "guided_regex"),
        ({"guided_choice": ["a"]}, Grammar("choice", '["a"]'), "guided_choice"),
        ({"guided_grammar": "start: x"}, Grammar("lark", "start: x"), "guided_grammar"),
    ],
)
def test_each_field_asks_for_its_grammar(fields, grammar, param):
    assert params(**fields) == (grammar, param)


def test_neutral_values_ask_for_nothing():
    neutral = {"guided_json": None, "structured_outputs": None, "guided_choice": None}
    assert params(response_format={"type": "text"}, **neutral) is None
    assert params(response_format=None) is None
    assert params(response_format={"type": "text"}, guided_regex="a") == (Grammar("regex", "a"), "guided_regex")


def test_options_about_whitespace_are_part_of_the_schema():
    compact, _ = params(structured_outputs={"json": {"type": "object"}, "disable_any_whitespace": True})
    options = {"whitespace_flexible": False, "whitespace_pattern": None}
    assert json.loads(compact.text) == {"type": "object", "x-guidance": options}
    spaced, _ = params(structured_outputs={"json_object": True, "whitespace_pattern": " ?"})
    assert json.loads(spaced.text)["x-guidance"] == {"whitespace_pattern": " ?"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": []}}}, "response_format.json_schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[1]"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": 3}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, "structured_outputs"),
        ({"guided_json": "[" * 100_000}, "guided_json"),
        ({"guided_json": "[" * 2000}, "guided_json"),
        ({"guided_regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "guided_regex"),
        ({"guided_regex": "é" * (MAX_GRAMMAR_BYTES // 2 + 1)}, "guided_regex"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "guided_json": {}}, "guided_json"),
    ],
)
def test_what_cannot_be_a_grammar_is_refused_by_name(fields, param):
    with pytest.raises(RequestError) as caught:
        params(**fields)
    assert caught.value.http_status == 400
    assert caught.value.param is not None
    assert caught.value.param.startswith(param)


# --- answers of the demo model --------------------------------------------------------------------------------------


def text_of(reply) -> str:
    assert reply.status == 200, reply.body
    (choice,) = reply.json["choices"]
    assert choice["finish_reason"] == "stop", choice
    return choice["text"] if "text" in choice else choice["message"]["content"]


COMPACT = SCHEMA | {"x-guidance": {"whitespace_flexible": False, "whitespace_pattern": None}}
COMPACT_FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": COMPACT}}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": COMPACT_FORMAT, "temperature": 0},
        {"response_format": FORMAT, "temperature": 1.5, "seed": 3},
    ],
)
def test_answers_under_a_bounded_schema_end_by_themselves_and_are_valid(short_server, fields):
    fields = fields | {"max_tokens": 900}

    def ask(i: int):
        return (
            chat(short_server, f"thing {i}", **fields)
            if i % 2
            else complete(short_server, prompt=f"thing {i}", **fields)
        )

    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(ask, range(4)))
    for reply in replies:
        jsonschema.validate(json.loads(text_of(reply)), SCHEMA)


def compact(**fields: object) -> dict[str, object]:
    return {"structured_outputs": {"disable_any_whitespace": True} | fields}


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        (compact(json=SCHEMA), r'\{"name":.*\}'),
        ({"guided_regex": r"\d{3}-[a-f]{2,4}"}, r"\d{3}-[a-f]{2,4}"),
        ({"guided_choice": ["red", "green", "blue é"]}, "red|green|blue é"),
        ({"guided_grammar": 'root ::= "<" [a-c] [a-c] ">"'}, "<[a-c]{2}>"),
        ({"structured_outputs": {"grammar": 'start: "yes" | "no" "!"'}}, "yes|no!"),
    ],
)
def test_each_kind_of_grammar_shapes_the_answer(short_server, fields, pattern):
    for seed in range(3):
        reply = complete(short_server, max_tokens=900, temperature=1.2, seed=seed, **fields)
        assert re.fullmatch(pattern, text_of(reply), re.DOTALL)


def test_other_wishes_hold_together_with_a_grammar(short_server):
    fields = {"guided_regex": "[ab]{1,40}", "max_tokens": 100, "temperature": 1.0, "seed": 5}
    whole = complete(short_server, **fields, n=3, logprobs=2, min_tokens=4, presence_penalty=0.5)
    assert whole.status == 200, whole.body
    choices = whole.json["choices"]
    assert all(re.fullmatch("[ab]{1,40}", choice["text"]) for choice in choices)
    assert all(len(choice["logprobs"]["tokens"]) >= 4 for choice in choices)
    assert len({choice["text"] for choice in choices}) > 1
    short = complete(short_server, guided_regex="ab", min_tokens=9, max_tokens=20).json["choices"][0]
    assert (short["text"], short["finish_reason"]) == ("ab", "stop"), "a complete text ends before min_tokens"
    stopped = complete(short_server, guided_regex="[0-9]{3}x[0-9]{3}", stop="x", max_tokens=50).json["choices"][0]
    assert re.fullmatch("[0-9]{3}", stopped["text"])
    free = complete(short_server, guided_regex="ab", ignore_eos=True, max_tokens=30).json
    assert free["choices"][0]["finish_reason"] == "length"
    assert free["choices"][0]["text"].startswith("ab")
    assert free["usage"]["completion_tokens"] == 30


def test_streams_and_whole_answers_are_the_same_and_repeat(short_server):
    fields = {"response_format": COMPACT_FORMAT, "max_tokens": 900, "temperature": 1.3, "seed": 11}
    whole = complete(short_server, **fields)
    events = complete(short_server, **fields, stream=True).events
    streamed = "".join(event["choices"][0]["text"] for event in events[:-1])
    assert streamed == text_of(whole)
    assert text_of(complete(short_server, **fields)) == streamed


@pytest.mark.parametrize(
    ("fields", "param", "cause"),
    [
        ({"guided_regex": "(a"}, "guided_regex", "unclosed"),
        ({"guided_regex": r"[^\s\S]"}, "guided_regex", "no text matches"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar", "nothing"),
        ({"structured_outputs": {"json": {"type": "nothing"}}}, "structured_outputs.json", "nothing"),
        ({"guided_json": {"$ref": "#"}}, "guided_json", "no text matches"),
        ({"guided_json": {"type": "integer", "multipleOf": 9999991}}, "guided_json", "to compile"),
        ({"guided_regex": "(" * 3000 + "a" + ")" * 3000}, "guided_regex", "nest"),
    ],
)
def test_a_hostile_grammar_is_a_400_and_harms_no_client(short_server, fields, param, cause):
    pids = [rank.pid for rank in short_server.ranks()]
    reply = complete(short_server, **fields, stream=True)
    assert reply.status == 400, reply.body
    error = reply.json["error"]
    assert (error["param"], error["code"]) == (param, "invalid_grammar")
    assert cause in error["message"]
    assert text_of(complete(short_server, guided_regex="a{3}", max_tokens=9)) == "aaa"
    wait_until(lambda: [rank.pid for rank in short_server.ranks()] == pids)  # others look like ranks as they start


def test_grammars_that_grow_in_use_end_at_most_their_own_request(short_server):
    hostile = ["(a|b)*a(a|b){60}", "((a{0,50}){0,50}){0,50}x", "([a-z]{1,60} ){1,60}\\.", "(.*a){15}b"]
    pids = [rank.pid for rank in short_server.ranks()]
    for pattern in hostile:
        reply = complete(short_server, guided_regex=pattern, max_tokens=60, temperature=1.0, seed=1)
        assert reply.status in (200, 400), reply.body
    wait_until(lambda: [rank.pid for rank in short_server.ranks()] == pids)  # others look like ranks as they start
    assert all(value for name, value in metrics(short_server).items() if name.startswith("moestro:engine_ready"))


# --- the cheap fields -----------------------------------------------------------------------------------------------


def test_only_allowed_tokens_are_sampled(short_server, tokenizer):
    ids = tokenizer.encode("abc", add_special_tokens=False) + tokenizer.encode(" xyz", add_special_tokens=False)
    fields = {"allowed_token_ids": ids, "max_tokens": 30, "temperature": 1.5, "seed": 1, "logprobs": 0}
    reply = complete(short_server, **fields)
    assert reply.status == 200, reply.body
    tokens = reply.json["choices"][0]["logprobs"]["tokens"]
    assert set(tokens) <= {tokenizer.token_texts[i].text for i in ids}
    assert len(tokens) == 30, "end tokens are not allowed"


def test_bad_words_never_occur(server):
    fields = {"prompt": "def read_file(path):\n", "max_tokens": 80, "temperature": 0}
    plain = complete(server, **fields).json["choices"][0]["text"]
    assert "return" in plain or "open" in plain
    changed = complete(server, **fields, bad_words=["return", "open", "self"]).json["choices"][0]["text"]
    assert not re.search(r"\b(return|open|self)\b", changed)
    assert changed != plain


def test_prompt_logprobs_of_the_whole_vocabulary(short_server: Running, tokenizer):
    vocabulary = 4096
    reply = complete(short_server, prompt="def f(", prompt_logprobs=-1, max_tokens=1)
    assert reply.status == 200, reply.body
    first, *rest = reply.json["choices"][0]["prompt_logprobs"]
    assert first is None
    assert [len(found) for found in rest] == [vocabulary] * len(rest)
    assert len(rest) == len(tokenizer.encode("def f(", add_special_tokens=True)) - 1
    too_many = complete(short_server, prompt="x " * 600, prompt_logprobs=-1, max_tokens=1)
    assert too_many.status == 400


def test_a_grammar_that_becomes_too_complex_is_the_clients_fault():
    error = _failure(FinishReason.GRAMMAR)
    assert error is not None
    assert (error.http_status, error.code) == (400, "grammar_limit")
    assert _failure(FinishReason.STOP) is None


def test_many_requests_with_one_new_grammar_cost_one_check():
    used, refusing = Grammar("regex", "a+"), Grammar("regex", "b+")

    class Checker:
        num_checks = 0

        def known(self, _grammar):
            return None

        def check(self, grammar, _role):
            self.num_checks += 1
            time.sleep(0.1)
            return GrammarVerdict(None if grammar == used else "it is not liked", is_light=True)

        def close(self):
            pass

    async def test() -> None:
        checker = Checker()
        gate = GrammarGate(checker)
        waiting = [asyncio.create_task(gate.check(RequestedGrammar(used, "guided_regex"))) for _ in range(1000)]
        refused = [asyncio.create_task(gate.check(RequestedGrammar(refusing, "guided_regex"))) for _ in range(2)]
        await asyncio.sleep(0)
        waiting.pop(0).cancel()  # the first client has gone: the others wait for the same check
        assert await asyncio.gather(*waiting) == [used] * 999
        for each in await asyncio.gather(*refused, return_exceptions=True):
            assert isinstance(each, RequestError)
        assert checker.num_checks == 2
        await gate.check(RequestedGrammar(used, "guided_regex"))
        assert checker.num_checks == 3, "it is the checker that remembers"
        gate.close()

    asyncio.run(test())


def test_slow_grammars_delay_no_light_one_and_too_many_are_sent_away():
    class Checker:
        """Checks of slow grammars end when they may."""

        may_end, roles = Event(), list[str]()

        def known(self, _grammar):
            return None

        def check(self, grammar, role):
            self.roles.append(role)
            if role == CHECK:
                self.may_end.wait()
            return GrammarVerdict(None, is_light=role == TRY) if role == CHECK or grammar.text == "light" else None

        def close(self):
            pass

    async def test() -> None:
        checker = Checker()
        gate = GrammarGate(checker)

        def ask(text: str) -> asyncio.Task[Grammar]:
            return asyncio.create_task(gate.check(RequestedGrammar(Grammar("regex", text), "guided_regex")))

        slow = [ask(f"slow {i}") for i in range(1 + MAX_WAITING_CHECKS + 3)]  # One of them runs.
        assert (await ask("light")).is_light
        refused, _ = await asyncio.wait(slow, return_when=asyncio.FIRST_EXCEPTION)
        while len(refused) < 3:
            refused, _ = await asyncio.wait(slow, timeout=0.1)
        assert [(each.exception().http_status, each.exception().retry_after_s) for each in refused] == [(503, 1)] * 3
        checker.may_end.set()
        found = [each for each in await asyncio.gather(*slow, return_exceptions=True) if isinstance(each, Grammar)]
        assert [each.is_light for each in found] == [False] * (1 + MAX_WAITING_CHECKS)
        assert Counter(checker.roles) == {TRY: len(slow) + 1, CHECK: 1 + MAX_WAITING_CHECKS}
        gate.close()

    asyncio.run(test())


def test_a_request_whose_grammar_is_not_checked_in_time_ends_and_its_retry_finds_the_result():
    class Checker:
        """One check, which gets no processor until it may."""

        may_run, verdicts, num_checks = Event(), dict[Grammar, GrammarVerdict](), 0

        def known(self, grammar):
            return self.verdicts.get(grammar)

        def check(self, grammar, role):
            if role == TRY:
                return None
            self.num_checks += 1
            self.may_run.wait()
            return self.verdicts.setdefault(grammar, GrammarVerdict(None))

        def close(self):
            pass

    async def test() -> None:
        checker, requested = Checker(), RequestedGrammar(Grammar("regex", "a+"), "guided_regex")
        gate = GrammarGate(checker, max_wait_s=0.1)
        with pytest.raises(GrammarTimeoutError, match=r"guided_regex was not checked within 0\.1 s") as found:
            await gate.check(requested)
        assert (found.value.http_status, found.value.code, found.value.retry_after_s) == (503, "grammar_timeout", 5)
        with pytest.raises(GrammarTimeoutError):
            await gate.check(requested)
        checker.may_run.set()
        await asyncio.gather(*gate._checks.values())
        assert await gate.check(requested) == requested.grammar
        assert checker.num_checks == 1, "the check of the first request went on"
        gate.close()

    asyncio.run(test())


@pytest.mark.parametrize("has_same_grammars", [False, True])
def test_grammars_of_one_client_neither_refuse_nor_delay_those_of_another(has_same_grammars):
    """Also where the other client asks for a grammar that waits among them."""

    class Checker:
        """A check takes as long as the test wants."""

        turns, checked = Semaphore(0), list[str]()

        def known(self, _grammar):
            return None

        def check(self, grammar, role):
            self.turns.acquire()
            self.checked.append(grammar.text)
            return GrammarVerdict(None, is_light=True)

        def close(self):
            pass

    async def test() -> None:
        checker = Checker()
        gate = GrammarGate(checker)

        def ask(text: str, client: str) -> asyncio.Task[Grammar]:
            params = RequestedGrammar(Grammar("regex", text), "guided_regex")
            return asyncio.create_task(gate.check(params, client))

        flood = [ask(f"{i}", "stranger") for i in range(3 * MAX_WAITING_TRIES)]
        await asyncio.sleep(0)
        own = ask(f"{MAX_WAITING_TRIES - 1}" if has_same_grammars else "own", "honest")
        await asyncio.sleep(0.01)
        assert not own.done()
        for _ in range(MAX_TRIES + 2):
            checker.turns.release()
        assert (await asyncio.wait_for(own, 30)).is_light
        refused = [each for each in flood if each.done() and each.exception() is not None]
        assert len(refused) == 2 * MAX_WAITING_TRIES - MAX_TRIES + 1
        for _ in flood:
            checker.turns.release()
        await asyncio.gather(*flood, return_exceptions=True)
        gate.close()

    asyncio.run(test())
