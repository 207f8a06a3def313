"""Records of several servers: merged on the wall clock, simulated as they were and as one pool of engines."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from moestro.cli import main
from moestro.core.clock import ClockPair
from moestro.errors import ConfigError
from moestro.sim.replay import WhatIfSettings, what_if
from moestro.workload.traces.request_record import Header, RecordedRequest, read_request_record

S = 1_000_000_000
NUM = 40


def header(num_engines: int, wall_s: int, monotonic_s: int) -> Header:
    return Header(
        model="qwen3-30b-a3b",
        device="paced:h20",
        num_engines=num_engines,
        block_size=16,
        num_blocks=4000,
        max_model_len=4096,
        limits={"max_num_seqs": 16, "max_num_batched_tokens": 512},
        route_policy="round_robin",
        clocks=ClockPair(wall_s * S, monotonic_s * S),
    )


def requests(name: str, num_engines: int, begin_s: float, session: int) -> list[RecordedRequest]:
    """A request every 0.4 s from `begin_s` on the server's own clock, of one session of its own and one of all."""
    found = []
    for i in range(NUM):
        arrival_ns = round((begin_s + 0.4 * i) * S)
        found.append(
            RecordedRequest(
                request_id=f"{name}-{i}",
                arrival_ns=arrival_ns,
                admitted_ns=arrival_ns + 1_000_000,
                first_token_ns=arrival_ns + 60_000_000,
                last_token_ns=arrival_ns + 300_000_000,
                engine=i % num_engines,
                num_prompt_tokens=320,
                num_output_tokens=20,
                num_hit_tokens=0,
                max_tokens=32,
                block_hashes=np.random.default_rng([session, i]).bytes(20 * 16),
                session=session if i % 2 else 99,
            )
        )
    return found


def write(path, head: Header, entries: list[RecordedRequest]):
    path.write_bytes(msgspec.json.Encoder().encode_lines([head, *entries]))
    return path


@pytest.fixture
def paths(tmp_path):
    """Two servers on machines with clocks of their own: the second begins 10 s after the first, on the wall."""
    one = write(tmp_path / "one.jsonl", header(2, 1_000_000, 5_000), requests("a", 2, 5_001, 1))
    two = write(tmp_path / "two.jsonl", header(3, 1_000_100, 70), requests("b", 3, -19, 2))
    return one, two


def test_servers_are_aligned_on_the_wall_clock_and_their_engines_counted_through(paths):
    merged = read_request_record(*paths)
    assert merged.num_engines == 5
    starts = {name: next(r.arrival_ns for r in merged.requests if r.request_id == f"{name}-0") for name in "ab"}
    assert starts == {"a": 1_000_001 * S, "b": 1_000_011 * S}
    assert merged.arrival_ns.tolist() == sorted(merged.arrival_ns.tolist())
    for request, server in zip(merged.requests, merged.server.tolist(), strict=True):
        name, number = request.request_id.split("-")
        assert server == "ab".index(name)
        assert request.engine == (int(number) % 2 if name == "a" else 2 + int(number) % 3)
    part = merged.part(1)
    assert part.num_engines == 3
    assert [each.engine for each in part.requests] == [i % 3 for i in range(NUM)]


def test_each_server_is_simulated_alone_as_it_was(paths):
    """The baseline of the pool is what each record gives on its own, at its place in time."""
    merged = what_if(read_request_record(*paths), WhatIfSettings(policies=("least_loaded",)))
    titles = [title for title, _ in merged.runs]
    assert titles == ["recorded", "round_robin on each server (simulated)", "least_loaded (simulated)"]
    whole = merged.runs[1][1]
    record = read_request_record(*paths)
    for server, path in enumerate(paths):
        alone = what_if(read_request_record(path), WhatIfSettings()).runs[1][1]
        rows = np.flatnonzero(record.server == server)
        shift = whole.arrival_ns[rows[0]]
        for name in ("arrival_ns", "admitted_ns", "first_token_ns", "last_token_ns"):
            assert (getattr(whole, name)[rows] - shift).tolist() == getattr(alone, name).tolist()
        assert (whole.engine[rows] - [0, 2][server]).tolist() == alone.engine.tolist()
    assert set(merged.runs[2][1].engine.tolist()) == set(range(5)), "the other policy has all engines"


def test_the_recorded_policy_over_all_engines_is_a_change_too(paths):
    answer = what_if(read_request_record(*paths), WhatIfSettings(policies=("round_robin",)))
    assert len(answer.runs) == 3
    assert answer.moved["round_robin (simulated)"] > 0


def test_the_command_merges(paths, capsys):
    with pytest.raises(SystemExit):
        main(["sim", "--replay", *map(str, paths), "--policy", "session_affinity"])
    text = capsys.readouterr().out
    assert "80 requests recorded by 2 servers under round_robin" in text
    assert "Under session_affinity (simulated): " in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_blocks": 3000}, "two.jsonl, line 1: .* with another num_blocks"),
        ({"clocks": None}, "lacks its wall-clock time"),
        ({"route_policy": "lmetric"}, "with another route_policy"),
    ],
)
def test_servers_that_differ_are_not_merged(paths, change, words):
    one, two = paths
    write(two, msgspec.structs.replace(header(3, 1_000_100, 70), **change), requests("b", 3, -19, 2))
    with pytest.raises(ConfigError, match=words):
        read_request_record(one, two)


def test_one_record_given_twice_is_refused(paths):
    with pytest.raises(ConfigError, match="the same record is given twice"):
        read_request_record(paths[0], paths[0])


def test_the_number_of_engines_of_several_servers_is_theirs(paths, tmp_path):
    with pytest.raises(ConfigError, match="drop count"):
        what_if(read_request_record(*paths), WhatIfSettings(engines={"count": 9}))
