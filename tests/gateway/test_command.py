"""`moestro route`, `moestro explain` and `moestro replay` as an operator runs them, before a `moestro serve`."""

from __future__ import annotations

import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.running import (
    MOESTRO,
    PATIENCE_S,
    Running,
    call,
    complete,
    open_stream,
    read_to_end,
    read_to_end_of_answer,
    wait_until,
)

from moestro.cli import main

BODY = {"prompt": "def f(x):", "max_tokens": 2}
ROUTE = (MOESTRO, "route", "--admin-port", "0", "--metrics-interval", "0.2")


def route_to(*engines: Running, flags: tuple[str, ...] = ()) -> tuple[str, ...]:
    return (*ROUTE, *(part for engine in engines for part in ("--engine", engine.url)), *flags)


def admin_url(running: Running) -> str:
    found = re.search(r"(http://127\.0\.0\.1:\d+)/admin/engines", running.text)
    assert found, running.text
    return found[1]


@pytest.fixture(scope="module")
def routed(fake, tmp_path_factory) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("route")
    running = Running(route_to(fake, flags=("--record", str(directory / "record.jsonl"))), directory)
    yield running
    running.kill()


def test_the_banner_tells_what_is_behind_it_and_where_it_is(routed, fake):
    for words in ("1 of 1 up", fake.url, "moestro-demo", "moestro", "as text", "/admin/explain", routed.url):
        assert words in routed.text


def test_the_openai_client_does_not_notice(server, openai, tmp_path):
    running = Running(route_to(server), tmp_path)
    try:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        [model] = client.models.list().data
        messages = [{"role": "user", "content": "hi"}]
        raw = client.chat.completions.with_raw_response.create(
            model=model.id, messages=messages, max_tokens=8, temperature=0
        )
        whole = raw.parse()
        assert raw.headers["x-moestro-engine"] == server.url.removeprefix("http://")
        assert whole.usage.prompt_tokens_details.cached_tokens is not None
        chunks = list(
            client.chat.completions.create(
                model=model.id,
                messages=messages,
                max_tokens=8,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.completions.create(model="none", prompt="x")
        figures = call(running, "GET", "/metrics").body.decode()
        assert f'moestro:route_prompt_tokens_total{{engine="{server.url[7:]}"}} ' in figures
    finally:
        assert running.stop() == 0


def test_what_strangers_send_is_refused_and_one_log_line_of_each_kind(routed):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    for _ in range(3):
        for sent, status in (
            (b"POST /v1/%6coad_lora_adapter HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", 400),
            (b"POST /v1/load_lora_adapter HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 404),
            (head + b"Secret: \x00\r\n\r\n", 400),
            (head + b"Host: y\r\n\r\n", 400),
            (head + b"Expect: more\r\n\r\n", 417),
        ):
            with socket.create_connection(routed.address, timeout=300) as stranger:
                stranger.sendall(sent)
                answer = b"".join(iter(lambda: stranger.recv(65536), b""))
                assert answer.startswith(b"HTTP/1.1 %d " % status)
                assert b'{"error":{"message":' in answer
    assert routed.text.count("refused with 400: Malformed HTTP") == 1
    assert routed.text.count("refused with 417") == 1
    assert "Secret" not in routed.text
    assert "Traceback" not in routed.text


def test_a_hundred_megabytes_of_trailer_are_refused_and_delay_no_client(routed):
    with socket.create_connection(routed.address, timeout=300) as stranger:
        stranger.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nA: ")

        def pour() -> None:
            for _ in range(100):
                stranger.sendall(b"v" * (1 << 20))

        pouring = threading.Thread(target=pour)
        pouring.start()
        longest_s = 0.0
        while pouring.is_alive():
            begin_s = routed.cpu_s()
            assert call(routed, "GET", "/health").status == 200
            longest_s = max(longest_s, routed.cpu_s() - begin_s)
        assert stranger.recv(65536).startswith(b"HTTP/1.1 431 ")
    assert longest_s < 2.0  # a read used to copy all that had come before: seconds


@pytest.mark.parametrize("is_router", [True, False])
def test_the_port_of_clients_explains_nothing_and_the_error_names_the_other(routed, fake, capsys, is_router):
    url = (routed if is_router else fake).url
    with pytest.raises(SystemExit) as ended:
        main(["explain", "some", "--admin-url", url])
    assert ended.value.code != 0
    words = f"{url} is not the operators' port of Moestro (status 404): give that of --admin-port"
    assert words in capsys.readouterr().err


def test_a_request_is_explained_from_the_router_and_from_its_record(routed, capsys):
    complete(routed, max_tokens=3)
    answer = call(routed, "POST", "/v1/completions", {"prompt": "def f(x):"}, X_Request_Id="explain-me")
    assert answer.headers["x-request-id"] == "explain-me"
    record = routed.directory / "record.jsonl"
    wait_until(lambda: any(b'"Story"' in line and b"explain-me" in line for line in record.read_bytes().splitlines()))
    reported = []
    for place in (("--admin-url", admin_url(routed)), ("--record", str(record))):
        with pytest.raises(SystemExit) as ended:
            main(["explain", "explain-me", *place, "--perfetto", str(routed.directory / "trace.json")])
        assert b'"to ' in (routed.directory / "trace.json").read_bytes()
        assert ended.value.code == 0
        reported.append(capsys.readouterr().out)
    assert reported[0] == reported[1]
    for words in ("explain-me", "answered 200", answer.headers["x-moestro-engine"], "prompt tokens"):
        assert words in reported[0]
    assert "def f" not in record.read_text(), "prompts are not in the record"
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(record)])
    assert ended.value.code == 0
    assert re.search(r"^(\d+) of \1 decisions are reproduced$", capsys.readouterr().out, re.M)


@pytest.mark.parametrize(
    ("place", "words", "code"),
    [
        (("--admin-url", "http://127.0.0.1:1"), "nothing answers", 1),
        (("--record", "/missing/file"), "cannot be read", 2),
    ],
)
def test_what_cannot_be_explained_is_an_error(place, words, code, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["explain", "none", *place])
    assert ended.value.code == code
    assert words in capsys.readouterr().err


def test_an_unknown_request_is_an_error(routed, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["explain", "none", "--admin-url", admin_url(routed)])
    assert ended.value.code == 2
    assert "Request none is unknown" in capsys.readouterr().err


def test_a_pause_of_the_router_itself_costs_no_request_and_opens_no_breaker(fake, tmp_path):
    patience = ("--idle-timeout", "1", "--first-byte-timeout", "1", "--stall-timeout", "1", "--probe-timeout", "1")
    running = Running(route_to(fake, flags=(*patience, "--health-interval", "0.3")), tmp_path)
    try:
        stream = open_stream(running, max_tokens=1500)  # 3 s of tokens
        running.process.send_signal(signal.SIGSTOP)
        time.sleep(4)
        running.process.send_signal(signal.SIGCONT)
        assert b"data: [DONE]" in read_to_end_of_answer(stream)
        assert "is open" not in running.text
        assert "is stalled" not in running.text
        assert complete(running, max_tokens=2).status == 200
    finally:
        assert running.stop() == 0


def test_requests_leave_an_engine_whose_process_is_stopped(fake, fake_command, tmp_path, capsys):
    for name in ("engine", "router"):
        (tmp_path / name).mkdir()
    engine = Running(fake_command, tmp_path / "engine")
    flags = ("--route-policy", "round_robin", "--health-interval", "60")
    router = Running(route_to(engine, fake, flags=flags), tmp_path / "router")
    try:
        engine.process.send_signal(signal.SIGSTOP)
        with ThreadPoolExecutor(4) as clients:
            fields = [
                clients.submit(call, router, "POST", "/v1/completions", BODY, X_Request_Id=f"moved-{number}")
                for number in range(4)
            ]
            answers = [each.result() for each in fields]
        stopped, other = (each.url.removeprefix("http://") for each in (engine, fake))
        assert [(answer.status, answer.headers["x-moestro-engine"]) for answer in answers] == [(200, other)] * 4
        moved = [answer for answer in answers if "stopped answering" in answer.headers["x-moestro-reason"]]
        assert len(moved) == 2
        assert router.text.count(f"engine {stopped} is suspected") == 1
        assert router.text.count(f"engine {stopped} is down") == 1
        assert {complete(router).headers["x-moestro-engine"] for _ in range(4)} == {other}
        with pytest.raises(SystemExit):
            main(["explain", moved[0].headers["x-request-id"], "--admin-url", admin_url(router)])
        assert f"{stopped} stopped answering" in capsys.readouterr().out
        engine.process.send_signal(signal.SIGCONT)
        wait_until(lambda: f"engine {stopped} is up (was down)" in router.text)
        assert router.stop() == 0
    finally:
        engine.process.send_signal(signal.SIGCONT)
        engine.kill()
        router.kill()


def test_a_stopped_router_finishes_what_runs_and_refuses_what_comes(fake, tmp_path):
    running = Running(route_to(fake), tmp_path)
    stream = open_stream(running, max_tokens=100, priority=5)
    waiting = socket.create_connection(running.address)
    ended: list[bytes] = []
    reader = threading.Thread(target=lambda: ended.append(read_to_end(stream)))
    reader.start()
    running.process.send_signal(signal.SIGTERM)
    wait_until(lambda: call(running, "GET", "/ready").status == 503)
    assert call(running, "GET", "/health").status == 200
    refused = complete(running)
    assert (refused.status, refused.json["error"]["code"]) == (503, "shutting_down")
    assert running.process.wait(PATIENCE_S) == 0
    reader.join()
    waiting.close()
    assert b"data: [DONE]" in ended[0]


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_streams_with_the_cause(fake, tmp_path, second):
    running = Running(route_to(fake, flags=("--shutdown-timeout", "3600")), tmp_path)
    stream = open_stream(running, max_tokens=4000)
    running.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "stopping: 1 requests" in running.text)
    assert running.stop(second) == 0
    rest = read_to_end(stream)  # A reset connection would raise.
    assert rest.rstrip(b"\r\n").endswith(b'"code":"shutting_down"}}')
    assert rest.count(b"event: error\ndata: ") == 1
    assert b"[DONE]" not in rest
    assert "Traceback" not in running.text


def test_what_has_not_ended_in_time_hears_why(fake, tmp_path):
    running = Running(route_to(fake, flags=("--shutdown-timeout", "0.2")), tmp_path)
    stream = open_stream(running, max_tokens=4000)
    assert running.stop() == 0
    rest = read_to_end(stream)
    assert b"event: error" in rest
    assert b'"code":"shutting_down"' in rest


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "give --engine http://HOST:PORT"),
        (("--engine", "localhost"), "NAME=http://HOST:PORT"),
        (("--engine", "http://a:1", "--engine", "x=http://a:1"), "exists already"),
        (("--engine", "http://a:1", "--route-policy", "nearest"), "unknown route policy"),
        (("--engine", "http://a:1", "--tokenizer", "/missing"), "no directory /missing"),
        (("--engine", "http://a:1", "--record", "/missing/x"), "cannot be written"),
        (("--engine", "http://a:1", "--admin-host", "0.0.0.0"), "--admin-api-key"),
    ],
)
def test_an_impossible_setting_is_reported_in_one_line(flags, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["route", "--port", "0", "--admin-port", "0", *flags])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_a_taken_port_is_known_at_once(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit) as ended:
        main(["route", "--engine", "http://a:1", "--admin-port", "0", "--port", str(taken.getsockname()[1])])
    assert ended.value.code == 2
    assert "give another" in capsys.readouterr().err


def test_settings_come_from_flags_environment_and_file_and_secrets_stay(tmp_path, monkeypatch, capsys):
    path = tmp_path / "route.yaml"
    path.write_text("engine: [http://a:1, b=http://b:2]\nmax-retries: 5\nengine_api_key: sk-hidden\nport: 1\n")
    monkeypatch.setenv("MOESTRO_STALL_TIMEOUT", "7")
    with pytest.raises(SystemExit) as ended:
        main(["route", "--config", str(path), "--port", "2", "--print-config"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert f'engine: ["http://a:1", "b=http://b:2"]  # {path}:1' in printed
    assert f"max_retries: 5  # {path}:2" in printed
    assert "port: 2  # command line" in printed
    assert "stall_timeout: 7.0  # environment variable MOESTRO_STALL_TIMEOUT" in printed
    assert "sk-hidden" not in printed
