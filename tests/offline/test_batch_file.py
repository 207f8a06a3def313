"""`moestro run-batch`: each line of the input gets exactly one line of answer or error."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from robustness.strangers.nasty_json import BODIES, nasty_text
from support.running import MOESTRO, Running, call, run_command, wait_until
from support.text_files import WRITERS

from moestro.cli import main
from moestro.offline.batch_file import BATCH_PATHS, answer_line
from moestro.offline.server import ApiAnswer

PACED = ("--model", "qwen3-30b-a3b", "--device", "paced:h20", "--paced-arithmetic", "none")
GREEDY = {"temperature": 0, "max_tokens": 6, "return_token_ids": True}


def run_batch(directory: Path, lines: Sequence[object], *flags: str) -> tuple[list[dict[str, Any]], str, int]:
    """The lines of the output, standard error, and the exit status."""
    source, target = directory / "in.jsonl", directory / "out.jsonl"
    source.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    done = run_command([MOESTRO, "run-batch", "-i", source, "-o", target, *flags])
    answers = [json.loads(line) for line in target.read_text().splitlines()] if target.exists() else []
    return answers, done.stderr, done.returncode


def completion(number: object, **fields: object) -> dict[str, object]:
    body = GREEDY | {"prompt": f"def f{number}("} | fields
    return {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": body}


def chat(number: object, **fields: object) -> dict[str, object]:
    body = GREEDY | {"messages": [{"role": "user", "content": f"Write f{number}."}]} | fields
    return {"custom_id": f"m{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def tokens(body: dict[str, Any]) -> list[list[int]]:
    return [choice["token_ids"] for choice in body["choices"]]


def test_fifty_lines_get_the_answers_of_the_server_and_broken_ones_their_errors(server: Running, tmp_path):
    good = [make(number) for number in range(25) for make in (completion, chat)]
    broken = [
        "not json",
        "[1, 2]",
        "",
        completion("no_id") | {"custom_id": None},
        completion("get") | {"method": "GET"},
        completion("url") | {"url": "/v1/embeddings"},
        completion("body") | {"body": [1]},
        completion("stream", stream=True),
        completion("cold", temperature=-1),
        chat("unknown", model="no-such-model"),
        completion("typed", max_tokens="six"),
    ]
    lines = [*good[:25], *broken, *good[25:]]
    answers, log, status = run_batch(tmp_path, lines, "--url", f"{server.url}/v1/")
    assert status == 1
    assert log == (
        f"50 answered of 60, 10 errors (lines 26, 27, 29, 30, 31, 32, 33, 34 and 2 more): {tmp_path / 'out.jsonl'}\n"
    )
    messages = [answer["error"]["message"] for answer in answers if answer["error"]]
    for number in (26, 27):
        assert sum(message.startswith(f"Line {number} is not a JSON object") for message in messages) == 1
    for number in range(29, 34):
        assert sum(message.startswith(f"Line {number}: ") for message in messages) == 1
    by_id = {answer["custom_id"]: answer for answer in answers if answer["custom_id"]}
    assert Counter(answer["custom_id"] for answer in answers) == Counter([*by_id, None, None, None])
    assert len({answer["id"] for answer in answers}) == 60
    for line in good:
        response = by_id[line["custom_id"]]["response"]
        assert (response["status_code"], by_id[line["custom_id"]]["error"]) == (200, None)
        assert response["request_id"]
        assert tokens(response["body"]) == tokens(call(server, "POST", line["url"], line["body"]).json)
    refused = {name: answer for name, answer in by_id.items() if answer["error"] is not None}
    assert {name: answer["error"]["code"] for name, answer in refused.items()} == dict.fromkeys(
        ("cget", "curl", "cbody", "cstream"), "invalid_value"
    )
    assert all(answer["response"] is None for answer in refused.values())
    statuses = {name: by_id[name]["response"]["status_code"] for name in ("ccold", "munknown", "ctyped")}
    assert statuses == {"ccold": 400, "munknown": 404, "ctyped": 400}
    assert by_id["ccold"]["response"]["body"]["error"]["param"] == "temperature"


def test_a_model_is_started_with_the_flags_of_serve(tmp_path):
    lines = [completion(number, max_tokens=3) for number in range(50)]
    answers, log, status = run_batch(tmp_path, lines, *PACED, "--max-num-seqs", "8", "--max-num-queued-reqs", "20")
    assert status == 0, log
    assert {answer["response"]["status_code"] for answer in answers} == {200}  # Refusals of the queue are sent again.
    assert Counter(answer["custom_id"] for answer in answers) == Counter(line["custom_id"] for line in lines)


APIS = {
    "/v1/completions": {"prompt": "def f("},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Write f."}], "max_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": "Write f."}], "max_tokens": 4},
    "/v1/responses": {"input": "Write f.", "max_output_tokens": 16},
}


@pytest.mark.parametrize("write", WRITERS)
def test_lines_of_all_apis_are_answered_however_the_file_was_written(server: Running, tmp_path, write):
    lines = [{"custom_id": path, "method": "POST", "url": path, "body": body} for path, body in APIS.items()]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(write("".join(f"{json.dumps(line)}\n" for line in lines)))
    with pytest.raises(SystemExit) as ended:
        main(["run-batch", "-i", str(source), "-o", str(target), "--url", server.url])
    assert not ended.value.code
    answers = {answer["custom_id"]: answer for answer in map(json.loads, target.read_text().splitlines())}
    assert answers.keys() == APIS.keys() == set(BATCH_PATHS)
    assert {answer["response"]["status_code"] for answer in answers.values()} == {200}
    assert answers["/v1/messages"]["response"]["body"]["type"] == "message"
    assert answers["/v1/responses"]["response"]["body"]["object"] == "response"


def test_equal_ids_are_refused_by_name_and_lines_before_anything_runs(tmp_path, capsys):
    lines = [completion(1), completion(2), "not json", completion(1), completion(2), completion(3), completion(1)]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    target.write_text("kept")
    with pytest.raises(SystemExit) as ended:
        main(["run-batch", "-i", str(source), "-o", str(target), "--url", "http://127.0.0.1:9"])
    assert ended.value.code == 2
    assert "('c1': lines 1, 4, 7; 'c2': lines 2, 5): give each line" in capsys.readouterr().err
    assert target.read_text() == "kept"


def test_a_line_that_is_no_text_is_named_and_loses_no_other(server: Running, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b'{"custom_id": "\xff"}\n' + json.dumps(completion(1)).encode())
    with pytest.raises(SystemExit) as ended:
        main(["run-batch", "-i", str(source), "-o", str(target), "--url", server.url])
    assert ended.value.code == 1
    answers = {answer["custom_id"]: answer for answer in map(json.loads, target.read_text().splitlines())}
    assert answers[None]["error"]["message"].startswith("Line 1 is not a JSON object")
    assert answers["c1"]["response"]["status_code"] == 200


def test_without_a_server_each_line_has_an_error(tmp_path):
    answers, _, status = run_batch(tmp_path, [completion(1), completion(2)], "--url", "http://127.0.0.1:9")
    assert status == 1
    assert [answer["error"]["code"] for answer in answers] == ["no_answer"] * 2


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("-i", "missing.jsonl", "-o", "out.jsonl"), "cannot open missing.jsonl: No such file"),
        (("-i", "in.jsonl", "-o", "in.jsonl"), "is the input"),
        (("-i", "in.jsonl", "-o", "no/such/folder"), "cannot open no/such/folder"),
        (("-i", "in.jsonl", "-o", "out.jsonl", "--url", "127.0.0.1:9"), "--url must begin with http"),
        (
            ("-i", "in.jsonl", "-o", "out.jsonl", "--url", "http://x", "--engines", "2"),
            "--engines is for a server that",
        ),
        (("-i", "in.jsonl", "-o", "out.jsonl", "--engine", "2"), "--engine"),
        (("-i", "in.jsonl", "-o", "out.jsonl", "--port", "80"), "--port is not for a server that is started here"),
    ],
)
def test_a_wrong_command_says_what_is_wrong(flags, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text("{}\n")
    with pytest.raises(SystemExit) as ended:
        main(["run-batch", *flags])
    assert ended.value.code == 2
    assert text in capsys.readouterr().err
    assert Path("in.jsonl").read_text() == "{}\n"


def test_after_the_end_of_the_started_server_each_line_still_has_an_answer_or_an_error(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [completion(0, max_tokens=1), *(completion(number, max_tokens=8000) for number in range(1, 300))]
    source.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    command = [MOESTRO, "run-batch", "-i", source, "-o", target, *PACED]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as program:
        wait_until(lambda: target.exists() and target.stat().st_size > 0)
        (started,) = psutil.Process(program.pid).children()
        started.kill()
        _, log = program.communicate(timeout=300)
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert program.returncode == 1
    assert "the server ended with status -9" in log
    assert Counter(answer["custom_id"] for answer in answers) == Counter(line["custom_id"] for line in lines)
    assert {answer["error"]["code"] for answer in answers if answer["error"]} == {"no_answer"}


class EchoClient:
    """Answers each request with its own body."""

    async def post(self, path: str, body: bytes) -> ApiAnswer:
        assert path in BATCH_PATHS
        return ApiAnswer(200, body, "r")


def test_law_any_line_has_one_answer_that_can_be_written():
    valid = [
        {"custom_id": "a", "method": "POST", "url": path, "body": body}
        for path in BATCH_PATHS
        for body in BODIES[path]
        if not body.get("stream")
    ]

    async def answer_all() -> Counter[str]:
        rng, ends = Random(2), Counter[str]()
        for _ in range(3000):
            answer = await answer_line(EchoClient(), 7, nasty_text(rng, valid))
            written = msgspec.json.encode(answer)
            assert b"\n" not in written
            assert answer.is_good or "Line 7" in answer.error.message
            ends["good" if answer.is_good else answer.error.code] += 1
        return ends

    ends = asyncio.run(answer_all())
    assert ends["good"] > 100
    assert ends["invalid_json"] > 100
