"""A live router's record as a workload, and its requests decided by another policy."""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import replace

import msgspec
import pytest
from gateway.rig import looped
from gateway.test_record import run
from rich.console import Console
from support.routers import request

from moestro.cli import main
from moestro.cli.recorded.replay import print_redecisions, redecide
from moestro.core.clock import ClockPair
from moestro.core.hashing import HASH_BYTES, name_key
from moestro.errors import ConfigError, QueueFullError
from moestro.routing.decision_log import Attempt, RequestTrace
from moestro.routing.decision_record import PolicyText, RecordedRouter, RequestEnded, Submitted, decode_entry, replay
from moestro.routing.in_flight import PeerRequest
from moestro.routing.settings import RouterSettings
from moestro.sim.records import is_router_record, read_router_record
from moestro.sim.replay import WhatIfSettings, read_engines, what_if

COST = "h20/qwen3-30b-a3b"


@looped
async def test_a_live_routers_record_is_simulated_with_the_lengths_that_engines_counted(tmp_path):
    path = tmp_path / "record.jsonl"
    await run(path, "round_robin")
    assert is_router_record(path)
    record = read_router_record(path)
    assert len(record) == 40, "a retry is no other request"
    assert {each.num_prompt_tokens for each in record.requests} == {500}, "as counted, not as estimated from the text"
    assert {each.num_output_tokens for each in record.requests} == {9}
    assert {each.session for each in record.requests} == {name_key(f"s{i}") for i in range(4)}
    assert all(len(each.block_hashes) == 500 // record.header.block_size * HASH_BYTES for each in record.requests)
    answer = what_if(record, WhatIfSettings(policies=("session_affinity",), cost=COST))
    recorded, _, affine = (results for _, results in answer.runs)
    numbers = [each.session for each in record.requests]
    homes = {number: {int(affine.engine[i]) for i, each in enumerate(numbers) if each == number} for number in numbers}
    assert all(len(engines) == 1 for engines in homes.values())
    assert (recorded.first_token_ns >= recorded.arrival_ns).all()
    assert answer.report.outcomes[0].max_queue_depth is None, "a router sees no queues"
    assert any("first byte" in note for note in answer.report.notes)
    assert any("max_num_seqs 256" in note for note in answer.report.notes)


@looped
async def test_what_a_router_cannot_tell_is_left_out_and_counted(tmp_path):
    path = tmp_path / "record.jsonl"
    await run(path, "round_robin", num_requests=8)
    lines = path.read_bytes().splitlines(keepends=True)
    entries = [decode_entry(line) if line.strip() else None for line in lines]
    ends = [i for i, entry in enumerate(entries) if isinstance(entry, RequestEnded) and entry.num_output_tokens]
    lines[ends[0]] = msgspec.json.encode(msgspec.structs.replace(entries[ends[0]], num_output_tokens=None)) + b"\n"
    path.write_bytes(b"".join(lines))
    record = read_router_record(path)
    assert len(record) == 7
    assert any("left out: 1 have answers without usage" in note for note in record.notes)
    without = [re.sub(rb'"num_output_tokens":\d+', b'"num_output_tokens":null', line) for line in lines]
    path.write_bytes(b"".join(without))
    with pytest.raises(ConfigError, match="include_usage"):
        read_router_record(path)


def test_a_scored_prompt_of_a_router_is_replayed_without_latencies(tmp_path):
    """An answer of 0 tokens once counted as one without usage."""
    path = tmp_path / "record.jsonl"
    entries = routed(path)
    scored = {f"r{i}" for i in range(0, 20, 4)}
    entries = [
        msgspec.structs.replace(entry, num_output_tokens=0)
        if isinstance(entry, RequestEnded) and entry.request_id in scored
        else entry
        for entry in entries
    ]
    path.write_bytes(msgspec.json.Encoder().encode_lines(entries))
    record = read_router_record(path)
    assert len(record) == 20
    assert not any("without usage" in note for note in record.notes)
    assert {each.request_id for each in record.requests if each.max_tokens == 0} == scored
    answer = what_if(record, WhatIfSettings(policies=(), cost=COST))
    assert answer.report.outcomes[0].num_preemptions is None, "a router knows of none"
    path.write_bytes(path.read_bytes() + b'{"type":"Submi')
    assert read_router_record(path).notes[-1].startswith(f"{path}, line {len(entries) + 1} is cut off")
    for _, results in answer.runs:
        assert results.is_answered.all()
        assert len(results.records().answered) == 15
        assert (results.last_token_ns >= results.arrival_ns).all()


def routed(path, policy="round_robin", num_blocks=None, num_requests=24, estimate=1.0):
    """A router's record of sessions that share their beginnings, whose prompts it estimates."""
    entries = []
    router = RecordedRouter(PolicyText(policy), RouterSettings(max_num_queued=3), entries.append)
    for _ in range(2):
        router.set_routable(router.add_engine(), routable=True)
    for i in range(num_requests):
        name = f"r{i}"
        prompt = [i % 3] * 160 + [100 + i] * 80
        fields = request(name, prompt=prompt, session_id=f"s{i % 3}" if i % 4 else None, user="u")
        router.submit(fields, 1000 * i + 1)
        if i >= 4:
            router.first_token(f"r{i - 4}", 1000 * i + 2)
            router.ended(f"r{i - 4}", 1000 * i + 3, 5)
    path.write_bytes(msgspec.json.Encoder().encode_lines(entries))
    return entries


def reported(path, *policies: str) -> str:
    text = io.StringIO()
    print_redecisions([path], policies, Console(file=text, width=200, soft_wrap=True))
    return text.getvalue()


def test_the_recorded_policy_changes_nothing(tmp_path):
    path = tmp_path / "record.jsonl"
    for policy in ("round_robin", "lmetric", "session_affinity"):
        routed(path, policy)
        found = redecide(path.read_bytes().splitlines(), PolicyText(policy))
        assert (found.num, found.num_moved, found.first) == (24, 0, None)
        assert found.was == found.now


def test_an_affinity_policy_follows_its_own_choices_not_the_recorded_ones(tmp_path):
    path = tmp_path / "record.jsonl"
    routed(path)
    found = redecide(path.read_bytes().splitlines(), PolicyText("session_affinity"))
    assert found.num_moved > 0
    assert found.was.requests == {0: 12, 1: 12}
    assert found.now.requests.total() == 24
    text = reported(path, "session_affinity")
    assert f"Under session_affinity, {found.num_moved} of 24 decisions" in text
    assert "goes by session_id, which 25% of the requests do not name" in text
    assert "first difference: request r" in text
    assert "user_affinity goes by" not in reported(path, "user_affinity"), "all requests name their user"


def test_a_request_that_one_of_both_refused_is_in_flight_in_neither(tmp_path):
    """Affinity fills engine 0, the smallest batch engine 1: each refuses a request that may not go to the other one."""
    path = tmp_path / "record.jsonl"
    entries = []
    router = RecordedRouter(PolicyText("user_affinity"), RouterSettings(max_num_queued=2), entries.append)
    for _ in range(2):
        router.set_routable(router.add_engine(), routable=True)
    for i, exclude in enumerate([(1,), (), (1,), (0,), (0,)]):
        with contextlib.suppress(QueueFullError):
            router.submit(request(f"r{i}", user="ann"), i, exclude)
    for i in (0, 1, 3, 4):
        router.ended(f"r{i}", 10 + i, 1)
    router.submit(request("r5", user="ann"), 20)
    path.write_bytes(msgspec.json.Encoder().encode_lines(entries))
    refusals = [entry.refusal for entry in entries if isinstance(entry, Submitted)]
    assert refusals == [None, None, "QueueFullError", None, None, None]
    pairs = list(replay(path.read_bytes().splitlines(), PolicyText("least_loaded")))
    assert [again.refusal for _, again in pairs] == [None] * 4 + ["QueueFullError", None]
    last = pairs[-1][1].decision
    assert [each.num_requests for each in last.candidates] == [0, 0], "all others have ended"


def test_the_head_names_the_recorded_policy_and_other_files_are_refused(tmp_path):
    path = tmp_path / "record.jsonl"
    routed(path, "lmetric")
    assert "than under lmetric" in reported(path, "round_robin")
    for text in ("", "{}\n", "no json\n"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="contains no decision"):
            reported(path, "round_robin")
    with pytest.raises(ConfigError, match="cannot be read"):
        reported(tmp_path / "missing", "round_robin")
    routed(path)
    with pytest.raises(ConfigError, match="unknown route policy 'dice'"):
        reported(path, "dice")


def test_the_engines_of_a_router_are_described_in_a_file(tmp_path, capsys):
    path, engines = tmp_path / "record.jsonl", tmp_path / "engines.toml"
    routed(path)
    engines.write_text("[engines]\nmax_num_seqs = 2\nnum_blocks = 900\ngpu = 'h100'\n[other]\nx = 1\n")
    assert read_engines(engines) == {"max_num_seqs": 2, "num_blocks": 900, "gpu": "h100"}
    with pytest.raises(SystemExit) as ended:
        main(["sim", "--replay", str(path), "--policy", "lmetric", "--engines", str(engines)])
    assert not ended.value.code
    text = capsys.readouterr().out
    assert "Simulated: 2 with 900 blocks of 16 tokens, max_num_seqs 2, max_num_batched_tokens 2,048" in text
    assert "4 had not ended" in text
    for wrong, words in (("[engines]\nseats = 1", "unknown field `seats`"), ("x = 1", "no table"), ("[e", "engines")):
        engines.write_text(wrong)
        with pytest.raises(SystemExit):
            main(["sim", "--replay", str(path), "--engines", str(engines)])
        assert words in capsys.readouterr().err


def test_the_engines_of_a_router_keep_the_blocks_of_its_record(tmp_path):
    """Hashes of 16 tokens each once stood for blocks of 8, and a prompt's second half for nothing."""
    path = tmp_path / "record.jsonl"
    routed(path)
    record = read_router_record(path)
    same, smaller = (
        what_if(record, WhatIfSettings(cost=COST, engines={"num_blocks": num, "block_size": size}))
        for num, size in ((900, 16), (1800, 8))
    )
    assert smaller.report.settings["engines"]["block_size"] == 16
    assert smaller.report.outcomes == same.report.outcomes


def test_a_routers_record_without_prices_or_beside_that_of_a_server_is_refused(tmp_path, capsys):
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    routed(one)
    two.write_text('{"format": "moestro-requests-1"}\n')
    cases = (([one], "comes from a router and holds no step durations"), ([one, two], "other routers alone"))
    for arguments, words in (*cases, ([one, one], "given twice")):
        with pytest.raises(SystemExit):
            main(["sim", "--replay", *map(str, arguments)])
        assert words in " ".join(capsys.readouterr().err.split())


def of_several(tmp_path, num_routers=2, key_id="k", ages_s=(0.02, 0.4), num_requests=60) -> list:
    """Records of routers that take turns before the same two engines, and count each other's requests."""
    entries = [[] for _ in range(num_routers)]
    policy, settings = PolicyText("least_loaded"), RouterSettings()
    routers = [
        RecordedRouter(policy, settings, each.append, ClockPair(10**18, at * 10**9), key_id)
        for at, each in enumerate(entries)
    ]
    for router in routers:
        for _ in range(2):
            router.set_routable(router.add_engine(), routable=True)
    for i in range(num_requests):
        at = i % num_routers
        name, now_ns = f"r{i}", at * 10**9 + (i + 1) * 10**7  # on the clock of its own process
        engine = routers[at].submit(request(name, prompt=[i % 3] * 160 + [100 + i] * 80), now_ns).engine
        for other, router in enumerate(routers):
            if other != at:
                peer = PeerRequest(submit_ns=1, num_known_tokens=240, num_prefill_tokens=240)
                router.began_elsewhere(f"{at}/{i}", engine, peer, other * 10**9 + (i + 1) * 10**7 + 1)
        routers[at].first_token(name, now_ns + 2)
        routers[at].ended(name, now_ns + 3, 5)
        attempt = Attempt(
            engine="a", score=None, reason="", because="", hit_tokens=0, candidates=[], num_candidates=2, regret=None,
            peer_ages_s={"other": ages_s[i % 2]},
        )  # fmt: skip
        if ages_s[0]:
            trace = {"time": 0.0, "policy": "", "prompt_tokens": 240, "status": 200, "seconds": 0.1}
            usage = {"prompt_tokens": 240}
            entries[at].append(RequestTrace(request_id=name, attempts=[attempt], usage=usage, **trace))
    paths = [tmp_path / f"router.{at}.jsonl" for at in range(num_routers)]
    for path, each in zip(paths, entries, strict=True):
        path.write_bytes(msgspec.json.Encoder().encode_lines(each))
    return paths


def test_records_of_several_routers_join_before_the_same_engines(tmp_path):
    record = read_router_record(*of_several(tmp_path))
    assert (len(record), record.num_engines, record.num_routers) == (60, 2, 2)
    assert [each.request_id for each in record.requests] == [f"r{i}" for i in range(60)], "on the wall clock"
    assert record.router_delay_ms == pytest.approx(20)
    assert any("simulated with 20 ms" in note for note in record.notes)
    answer = what_if(record, WhatIfSettings(policies=("round_robin",), cost=COST))
    assert [title for title, _ in answer.runs][1:] == ["least_loaded (simulated)", "round_robin (simulated)"]
    alone = what_if(replace(record, num_routers=1), WhatIfSettings(policies=("round_robin",), cost=COST))
    assert alone.runs[2][1].engine.tolist() == [0, 1] * 30
    assert answer.runs[2][1].engine.tolist() != [0, 1] * 30, "two routers, each with a turn of its own"


def test_routers_that_exchange_nothing_are_simulated_so(tmp_path):
    record = read_router_record(*of_several(tmp_path, ages_s=(0.0, 0.0)))
    assert record.router_delay_ms is None
    assert any("exchanged nothing" in note for note in record.notes)


def test_records_of_several_routers_with_different_keys_do_not_join(tmp_path):
    (one,) = of_several(tmp_path, 1)
    (tmp_path / "b").mkdir()
    (other,) = of_several(tmp_path / "b", 1, key_id="other")
    with pytest.raises(ConfigError, match="one --record-key-file"):
        read_router_record(one, other)


def test_decisions_of_several_routers_are_repeated_together(tmp_path, capsys):
    paths = [str(path) for path in of_several(tmp_path, 3)]
    for arguments in (paths, [*paths, "--policy", "round_robin"]):
        with pytest.raises(SystemExit) as ended:
            main(["replay", *arguments])
        assert not ended.value.code
    text = " ".join(capsys.readouterr().out.split())
    assert "60 of 60 decisions are reproduced" in text
    assert "of 60 decisions" in text.partition("Under round_robin")[2]
    with pytest.raises(SystemExit):
        main(["replay"])
    assert "one or more files" in capsys.readouterr().err
