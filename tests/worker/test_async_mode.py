"""`moestro serve --mode async`: homes and workers with experts as processes, through the real command."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from support.expert_counts import ask_for_counts
from support.running import (
    EXACT,
    REAL,
    Reply,
    Running,
    call,
    call_admin,
    complete,
    free_port,
    has_ended,
    is_idle,
    metrics,
    open_stream,
    wait_until,
)

from moestro.cli import main
from moestro.core.experts.expert_table import DISTANCES
from moestro.wire.messages import WorkerFigures

# AMoE's Mixtral (mixtral-8x7b-mqa-top1) with four of its layers: each item takes a processor's time, and dilated, few
# items last as long as many.
NETWORK = str(Path(__file__).parents[1] / "support" / "short_mixtral")
SHORT = ("--device", "paced:h200", "--model", NETWORK, "--paced-arithmetic", "none", "--pace-dilation", "50")
PACED = (*SHORT, "--num-gpu-blocks-override", "5000", "--mode", "async")
NUM_LAYERS = 4
PROMPTS = ("def fibonacci(n):", "class Stack:\n    def", "import os\n", "for i in range(10):\n", "x = [1, 2, 3]\n")


def worker(server: Running, kind: str, number: int) -> psutil.Process:
    """The process of a worker that runs, or will run soon."""
    return wait_until(lambda: server.workers().get(f"{kind}-{number}"))


def names(server: Running) -> list[str]:
    """Names of the workers' processes."""
    return list(server.workers())


def ask_many(server: Running, num: int, **fields: object) -> list[Reply]:
    """Send `num` requests of several kinds at once."""

    def ask(i: int) -> Reply:
        body = {"prompt": PROMPTS[i % 5] * (1 + i % 3), "max_tokens": 4 + i % 5, "ignore_eos": True, "temperature": 0}
        body |= {"service_class": "be" if i % 3 else "ls"}
        body |= {"temperature": 0.8, "seed": i, "top_p": 0.9} if i % 4 == 1 else {}
        body |= {"logprobs": 2} if i % 4 == 2 else {}
        return complete(server, **(body | fields))

    with ThreadPoolExecutor(num) as pool:
        return list(pool.map(ask, range(num)))


def texts(replies: list[Reply]) -> list[str]:
    assert [reply.status for reply in replies] == [200] * len(replies)
    return [reply.json["choices"][0]["text"] for reply in replies]


def admin(server: SimpleNamespace, method: str, path: str = "", **headers: str) -> tuple[int, dict]:
    reply = call_admin(server, method, f"/admin/workers{path}", **headers)
    return reply.status, reply.json if reply.body else {}


def with_admin_port(directory: Path, *flags: str) -> Running:
    """A paced server that operators can reach."""
    return Running((*REAL, *PACED, *flags, "--admin-api-key", "key"), directory, admin_port=free_port())


@pytest.fixture(scope="module")
def paced(tmp_path_factory) -> Iterator[Running]:
    """Two homes and two workers with experts, which answer from a script."""
    running = with_admin_port(tmp_path_factory.mktemp("paced"), "--attention", "2", "--experts", "2")
    yield running
    processes = running.processes()
    try:
        assert running.stop() == 0
        assert running.left_behind() == []
        assert psutil.wait_procs(processes, timeout=30)[1] == []
    finally:
        running.kill()


@pytest.fixture(scope="module")
def expected(paced) -> list[str]:
    return texts(ask_many(paced, 6))


def test_each_process_shows_what_it_is(paced):
    assert names(paced) == ["attention-0", "attention-1", "experts-0", "experts-1"]
    lines = [each.cmdline()[-2:] for each in paced.workers().values()]
    assert lines == [["attention", "0"], ["attention", "1"], ["experts", "0"], ["experts", "1"]]


def test_routers_learn_the_pressure_of_experts_that_other_devices_hold(paced):
    def of_engines(name: str) -> list[float]:
        values = metrics(paced)
        return [values.get(f'moestro:{name}{{engine="{engine}"}}', 0.0) for engine in (0, 1)]

    def all_known() -> bool:
        texts(ask_many(paced, 6))
        return min(of_engines("expert_pressure")) > 0

    wait_until(all_known)
    assert max(of_engines("expert_pressure")) < 100, "queues are short"
    found = metrics(paced)
    for engine in (0, 1):
        shares = [found[f'moestro:expert_near_share{{distance="{name}",engine="{engine}"}}'] for name in DISTANCES]
        assert shares == [0, 1, 0], "the experts are on workers of their own, all on this machine"
    near = call_admin(paced, "GET", "/admin/experts", Authorization="Bearer key").json["near"]
    assert [set(each["experts"]["machine"]) for each in near] == [{1.0}, {1.0}]


def test_one_process_forks_the_workers_and_their_successors(paced):
    both = {*wait_until(lambda: len(found := paced.standbys()) == 2 and found)}
    restarts = [f'moestro:worker_restarts_total{{worker="expert worker {number}"}}' for number in range(2)]
    for count in (1, 2):
        for number in range(2):
            worker(paced, "experts", number).kill()
        # Until the server notices the ends, it says "serving" of processes that are gone.
        wait_until(lambda num=count: [metrics(paced)[name] for name in restarts] == [num] * 2)
        wait_until(lambda: all(each["phase"] == "serving" for each in workers(paced).values()))
    assert {*paced.standbys()} == both
    assert {each.ppid() for each in paced.ranks()} == {paced.process.pid}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("count", [1, 2])
def test_workers_are_replaced_although_processes_on_standby_are_lost_with_them(paced, expected, count, number):
    lost = wait_until(lambda: len(found := paced.standbys()) == 2 and found)[:count]
    old = worker(paced, "experts", 0)
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(ask_many, paced, 6)
        wait_until(lambda: not is_idle(paced))
        for each in (*lost, old):
            each.send_signal(number)
        assert texts(answers.result()) == expected
    wait_until(lambda: len(found := paced.standbys()) == 2 and not {*lost} & {*found})
    assert worker(paced, "experts", 0).pid != old.pid


def test_requests_are_balanced_over_the_homes_and_answered(paced, expected):
    assert len(set(expected)) > 3
    wait_until(lambda: is_idle(paced))
    values = metrics(paced)
    assert all(values[f'moestro:generation_tokens_total{{engine="{home}"}}'] > 0 for home in range(2))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["SIGKILL", "SIGSTOP"])
def test_no_request_notices_the_death_of_an_expert_worker(paced, expected, number):
    old = worker(paced, "experts", 1)
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(ask_many, paced, 6)
        wait_until(lambda: not is_idle(paced))
        old.send_signal(number)
        assert texts(answers.result()) == expected
    wait_until(lambda: not old.is_running())
    wait_until(lambda: worker(paced, "experts", 1).pid != old.pid)
    assert not sum(value for name, value in metrics(paced).items() if name.startswith("moestro:requests_moved_total"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["SIGKILL", "SIGSTOP"])
def test_a_home_s_death_is_an_engine_s_death(paced, expected, number):
    """A stopped home ends after a second, because the other one can take its requests."""
    old, restarts = worker(paced, "attention", 0), 'moestro:engine_restarts_total{engine="0"}'
    num_restarts = metrics(paced)[restarts]
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(ask_many, paced, 6)
        wait_until(lambda: call(paced, "GET", "/load").json["engines"][0]["num_running"] > 0)
        old.send_signal(number)
        assert texts(answers.result()) == expected
    assert number == signal.SIGKILL or "stopped by a signal" in paced.text
    wait_until(lambda: metrics(paced)['moestro:engine_ready{engine="0"}'] == 1)
    assert metrics(paced)[restarts] == num_restarts + 1
    assert texts(ask_many(paced, 6)) == expected


def test_workers_are_added_drained_and_removed_while_requests_run(paced, expected):
    key = {"Authorization": "Bearer key"}
    assert admin(paced, "GET")[0] == 401
    assert admin(paced, "GET", **key, Origin="http://page.example")[0] == 403
    status, body = admin(paced, "DELETE", "/0", **key)
    assert (status, body["error"]["code"]) == (409, "only_copy")
    assert admin(paced, "POST", "/7/drain", **key)[0] == 404
    assert admin(paced, "DELETE", f"/{'1' * 5000}", **key)[0] == 404
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(ask_many, paced, 6, max_tokens=20)
        status, added = admin(paced, "POST", **key)
        assert (status, added["name"], added["num_experts"]) == (201, "expert worker 2", 4 * NUM_LAYERS)
        wait_until(lambda: workers(paced)[2]["phase"] == "serving")
        assert admin(paced, "POST", "/0/drain", **key)[1]["is_draining"] is True
        assert admin(paced, "POST", "/0/resume", **key)[1]["is_draining"] is False
        assert admin(paced, "DELETE", "/0", **key)[0] == 204
        wait_until(lambda: "experts-0" not in names(paced))
        longer = texts(answers.result())
    assert all(long.startswith(short) for long, short in zip(longer, expected, strict=True))
    assert sorted(workers(paced)) == [1, 2]
    assert texts(ask_many(paced, 6)) == expected


@pytest.mark.parametrize("is_restarting", [False, True], ids=["which serves", "which waits for its restart"])
def test_a_worker_takes_the_place_of_one_that_died_while_it_was_removed(tmp_path, is_restarting):
    key = {"Authorization": "Bearer key"}
    running = with_admin_port(tmp_path, "--experts", "2", "--expert-copies", "2", "--no-standby")
    try:
        if is_restarting:  # the second end in a row delays the next start
            for _ in range(2):
                old = worker(running, "experts", 1)
                old.kill()
                wait_until(lambda: workers(running)[1]["phase"] in ("absent", "starting"))
        else:
            old = worker(running, "experts", 1)
        assert admin(running, "DELETE", "/1", **key)[0] == 204
        if not is_restarting:
            old.kill()
        wait_until(lambda: not old.is_running())
        status, added = admin(running, "POST", **key)
        assert (status, added["number"]) == (201, 1)
        wait_until(lambda: workers(running)[1]["phase"] == "serving")
        time.sleep(1.5)  # the delay of the restart, and the time after which a removed worker is dismissed
        state = workers(running)[1]
        assert (state["phase"], state["launch"], state["num_restarts"]) == ("serving", added["launch"], 0)
        assert names(running) == ["attention-0", "experts-0", "experts-1"]
        assert running.stop() == 0
    finally:
        running.kill()


def test_copies_answer_for_a_stopped_worker_which_is_used_again_when_it_goes_on(tmp_path, expected):
    flags = ("--attention", "1", "--experts", "2", "--expert-copies", "2", "--expert-timeout", "100")
    running = Running((*REAL, *PACED, *flags), tmp_path)

    def sent_to(number: int) -> float:
        link = f'moestro:link_messages_total{{destination="expert worker {number}",source="engine 0"}}'
        return metrics(running).get(link, 0)

    try:
        stopped = worker(running, "experts", 1)
        stopped.suspend()
        assert texts(ask_many(running, 6)) == expected
        assert metrics(running)['moestro:worker_doubts_total{worker="expert worker 1"}'] == 1
        num_before = sent_to(1)
        stopped.resume()
        wait_until(lambda: texts(ask_many(running, 6)) == expected and sent_to(1) > num_before)
        assert worker(running, "experts", 1) == stopped
        assert running.stop() == 0
    finally:
        running.kill()


@pytest.mark.parametrize("flags", [(), ("--no-standby",)], ids=["forked", "not forked"])
def test_stopped_workers_do_not_outlive_an_api_server_that_was_killed(flags, tmp_path):
    running = Running((*REAL, *PACED, *flags), tmp_path, forked=False)
    processes = [*running.ranks(), *running.standbys()]
    for each in processes:
        each.suspend()
    running.kill()
    wait_until(lambda: all(map(has_ended, processes)))


def workers(server) -> dict[int, dict]:
    """The workers with experts, by number."""
    found = admin(server, "GET", Authorization="Bearer key")[1]["workers"]
    return {each["number"]: each for each in found if each["kind"] == "experts"}


def test_queues_and_links_are_metrics(paced, expected):
    values = metrics(paced)
    families = {name.partition("{")[0] for name in values}
    assert families >= {
        "moestro:worker_serving",
        "moestro:worker_restarts_total",
        "moestro:worker_queue_tokens",
        "moestro:worker_queue_age_seconds",
        "moestro:worker_idle_seconds_total",
        "moestro:worker_messages_dropped_total",
        "moestro:link_messages_total",
        "moestro:link_bytes_total",
    }
    link = 'moestro:link_messages_total{destination="expert worker 1",source="engine 1"}'
    assert values[link] > 0
    figures = workers(paced)[1]["figures"]
    assert set(figures) == {"type", *WorkerFigures.__struct_fields__}
    assert len(figures["num_waiting"]) == NUM_LAYERS + 1


def test_a_home_that_ends_keeps_its_part_of_the_load_of_experts(paced, expected):
    key = {"Authorization": "Bearer key"}
    assert call_admin(paced, "GET", "/admin/experts").status == 401
    before = call_admin(paced, "GET", "/admin/experts", **key).json
    assert [len(before["engines"]), len(before["layers"])] == [2, NUM_LAYERS]
    assert all(engine["num_visits"] % NUM_LAYERS == 0 and engine["num_visits"] for engine in before["engines"])
    old = worker(paced, "attention", 0)
    old.kill()
    after = call_admin(paced, "GET", "/admin/experts", **key).json
    assert [len(after["engines"]), len(after["layers"])] == [2, NUM_LAYERS]
    wait_until(lambda: is_idle(paced) and texts(ask_many(paced, 6)) == expected)
    wait_until(lambda: call_admin(paced, "GET", "/admin/experts", **key).json["engines"][0]["age_s"] < 1)
    assert call_admin(paced, "GET", "/admin/experts?arrays=true", **key).json["arrays"]["pairs"] is None


@pytest.mark.parametrize(
    "sizes",
    [("1", "--experts", "1", "--expert-credits", "3"), ("2", "--experts", "0")],
    ids=["1+1 with few credits", "2 with both"],
)
def test_groups_of_other_sizes_give_the_same_answers(tmp_path, expected, sizes):
    running = Running((*REAL, *PACED, "--no-standby", "--attention", *sizes), tmp_path)
    try:
        assert len(running.ranks()) == 2
        assert texts(ask_many(running, 6)) == expected
        assert running.stop() == 0
    finally:
        running.kill()


def test_streams_that_clients_leave_free_all_that_they_held(paced, expected):
    streams = [open_stream(paced, max_tokens=4000) for _ in range(4)]
    wait_until(lambda: sum(engine["num_running"] for engine in call(paced, "GET", "/load").json["engines"]) == 4)
    for stream in streams:
        stream.close()
    wait_until(lambda: is_idle(paced))
    assert texts(ask_many(paced, 6)) == expected


def test_a_network_gives_the_answers_of_fused_mode_while_workers_die(short_server, short_command, tmp_path):
    fused = texts(ask_many(short_server, 12))
    # A process on standby would load torch twice here; it becomes a worker in the tests above.
    group = ("--mode", "async", "--attention", "2", "--experts", "2", "--no-standby")
    running = Running((*short_command, *EXACT, *group), tmp_path, admin_port=free_port())
    try:
        assert (ask_for_counts(running, "async") == ask_for_counts(short_server, "async")).all()
        assert texts(ask_many(running, 12)) == fused
        words = {"guided_regex": "[a-z]{2,9}( [a-z]{2,9}){0,5}"}
        assert texts(ask_many(running, 6, **words)) == texts(ask_many(short_server, 6, **words))
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(ask_many, running, 12)
            wait_until(lambda: not is_idle(running))
            worker(running, "experts", 0).kill()
            assert texts(answers.result()) == fused
        wait_until(lambda: is_idle(running))
        assert running.stop() == 0
    finally:
        running.kill()


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--engines", "2"), "give --attention 2 instead of --engines"),
        (("--expert-copies", "2"), "raise --experts"),
        (("--admin-api-key", "key"), "add the port"),
        (("--device", "paced:h200", "--model", "qwen2-7b", "--paced-arithmetic", "none"), "has none"),
        (
            ("--experts", "9", "--model", NETWORK, "--device", "paced:h200", "--paced-arithmetic", "none"),
            "too few",
        ),
        (("--attention-step-policy", "no_such"), "no_such"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused_with_what_to_do(flags, text, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--mode", "async", "--port", "0", *flags])
    assert ended.value.code in (1, 2)
    assert text in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("flags", [("--attention", "2"), ("--experts", "0"), ("--num-redundant-experts", "2")])
def test_settings_of_async_mode_alone_are_refused_in_other_modes(flags, capsys):
    with pytest.raises(SystemExit):
        main(["serve", *flags])
    assert "--mode async" in capsys.readouterr().err
