import json
import operator
from functools import reduce
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import zstandard
from support.text_files import WRITERS

from moestro.errors import ConfigError
from moestro.workload.traces.reading import read_trace

SHARED = Path(__file__).parents[3] / "shared" / "traces"
MOONCAKE = (
    '{"timestamp": 3000, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]}\n\n'
    '{"timestamp": 0, "input_length": 512, "output_length": 7, "hash_ids": [0]}\n'
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:17:03.9799600,4808,10\r\n2023-11-16 18:17:04.0000001,3,8\r\n"
)


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        path = tmp_path / name
        data = text.encode()
        path.write_bytes(zstandard.compress(data) if name.endswith(".zst") else data)
        return path

    return write


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.zst"])
def test_mooncake_is_read_packed_or_not_and_put_in_order_of_time(write, name):
    rows = read_trace(write(name, MOONCAKE))
    assert rows.timestamp_ns.tolist() == [0, 3_000_000_000]
    assert rows.num_prompt_tokens.tolist() == [512, 1000]
    assert rows.num_output_tokens.tolist() == [7, 5]
    assert [ids.tolist() for ids in rows.hash_ids] == [[0], [0, 1]]
    assert rows.block_size == 512


def test_the_block_size_follows_from_the_number_of_ids(write):
    line = '{{"timestamp": 1, "input_length": {}, "output_length": 1, "hash_ids": {}}}\n'
    assert read_trace(write("ceil.jsonl", line.format(33, [1, 2, 3]))).block_size == 16
    assert read_trace(write("floor.jsonl", line.format(33, [1, 2]))).block_size == 16
    with pytest.raises(ConfigError, match="none of the block sizes 16, 32"):
        read_trace(write("none.jsonl", line.format(33, [1, 2, 3, 4])))


def test_ids_that_name_only_a_blocks_own_tokens_are_numbered_anew(write):
    line = '{{"timestamp": 1, "input_length": 1024, "output_length": 1, "hash_ids": {}}}\n'
    rows = read_trace(write("t.jsonl", "".join(line.format(ids) for ids in ([7, 9], [8, 9], [7, 9]))))
    assert [ids.tolist() for ids in rows.hash_ids] == [[0, 1], [2, 3], [0, 1]]


def test_azures_seven_digits_are_kept(write):
    rows = read_trace(write("t.csv", AZURE))
    assert np.diff(rows.timestamp_ns).tolist() == [20_040_100]
    assert rows.num_prompt_tokens.tolist() == [4808, 3]
    assert rows.hash_ids is None


@pytest.mark.parametrize(
    ("stamp", "since_epoch_ns"),
    [
        ("2024-05-10 00:00:00.009930+00:00", 1_715_299_200_009_930_000),
        ("2024-05-12 00:00:00+00:00", 1_715_472_000_000_000_000),
        ("2024-05-10 02:00:00.5+02:00", 1_715_299_200_500_000_000),
        ("2024-05-10T00:00:00Z", 1_715_299_200_000_000_000),
    ],
)
def test_azures_stamps_of_2024_carry_a_zone_and_sometimes_no_digits(write, stamp, since_epoch_ns):
    rows = read_trace(write("t.csv", f"TIMESTAMP,ContextTokens,GeneratedTokens\n{stamp},2162,5\n"))
    assert rows.timestamp_ns.tolist() == [since_epoch_ns]


def test_bailians_turns_become_sessions_and_its_times_are_seconds(write):
    line = (
        '{{"chat_id": {}, "parent_chat_id": {}, "timestamp": {}, "input_length": 32, "output_length": 2,'
        ' "type": "text", "turn": 1, "hash_ids": {}}}\n'
    )
    turns = [(5, -1, 0.25, [1, 2]), (7, 5, 1, [1, 2]), (8, 99, 2, [1, 3]), (9, 7, 3, [1, 2]), (10, 99, 4, [4, 2])]
    rows = read_trace(write("t.jsonl", "".join(line.format(*turn) for turn in turns)))
    assert rows.timestamp_ns.tolist() == [250_000_000, 10**9, 2 * 10**9, 3 * 10**9, 4 * 10**9]
    assert rows.session.tolist() == [0, 0, 1, 0, 1], "a turn whose first one lies before the file stays with its kin"
    assert rows.block_size == 16
    assert [ids.tolist() for ids in rows.hash_ids] == [[0, 1], [0, 1], [0, 2], [0, 1], [3, 4]], (
        "its ids are not chained"
    )


BURSTGPT = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,a,2.5,ChatGPT,472,18,490,Conversation log\n45,,1,GPT-4,20,30,50,API log\n"
    "50,a,1,ChatGPT,0,0,0,Conversation log\n"
    "118.5,a,9,GPT-4,417,276,693,Conversation log\n"
)


def test_burstgpts_failures_are_no_requests_and_are_counted(write):
    rows = read_trace(write("t.csv", BURSTGPT))
    assert rows.timestamp_ns.tolist() == [5 * 10**9, 45 * 10**9, 118_500_000_000]
    assert rows.num_prompt_tokens.tolist() == [472, 20, 417]
    assert rows.num_output_tokens.tolist() == [18, 30, 276]
    assert rows.session.tolist() == [0, 1, 0]
    assert rows.num_left_out == 1


def test_turns_of_a_file_that_is_not_in_order_of_time_stay_together(write):
    """Each turn that the file has before the turn that it follows counted as a conversation of its own."""
    lines = [
        f'{{"chat_id": {i}, "parent_chat_id": {i - 1 if i % 3 else -1}, "timestamp": {i}, "input_length": 32,'
        ' "output_length": 2}\n'
        for i in range(6)
    ]
    rows = read_trace(write("chats.jsonl", "".join(reversed(lines))))
    assert rows.session.tolist() == [0, 0, 0, 1, 1, 1]


def test_burstgpts_first_release_names_no_sessions(write):
    rows = read_trace(write("t.csv", "Timestamp,Model,Request tokens,Response tokens\n5,GPT-4,7,8\n"))
    assert rows.session is None
    with pytest.raises(ConfigError, match="holds no requests"):
        read_trace(write("t.csv", "Timestamp,Model,Request tokens,Response tokens\n5,GPT-4,7,0\n"))


def test_lengths_without_times(write):
    rows = read_trace(write("t.csv.zst", "input_length,output_length\n632,34\n220,7\n"))
    assert rows.timestamp_ns is None
    assert rows.num_output_tokens.tolist() == [34, 7]


LENGTHS = ({"input_length": 64, "output_length": 4}, {"input_length": 65, "output_length": 5})
TIMES = ({"timestamp": 0}, {"timestamp": 6000})
HASHES = ({"hash_ids": [1, 2, 3, 4]}, {"hash_ids": [1, 2, 3, 4, 5]})
CHATS = ({"chat_id": 1, "parent_chat_id": -1}, {"chat_id": 2, "parent_chat_id": 1})
PROMPTS = ({"prompt": "a"}, {"prompt": "b"})


@pytest.mark.parametrize("parts", [parts for num in range(1, 6) for parts in combinations("LTHCP", num)])
def test_law_each_known_field_of_a_trace_is_used_or_named(write, parts):
    columns = {"L": LENGTHS, "T": TIMES, "H": HASHES, "C": CHATS, "P": PROMPTS}
    lines = [reduce(operator.or_, row) for row in zip(*(columns[part] for part in parts), strict=True)]
    path = write("t.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    if not {"L", "P"} & set(parts):
        with pytest.raises(ConfigError, match="line 1: its fields are"):
            read_trace(path)
        return
    rows = read_trace(path)
    unit = 10**9 if {"L", "C"} <= set(parts) else 10**6
    used = {
        "timestamp": rows.timestamp_ns is not None and rows.timestamp_ns.tolist() == [0, 6000 * unit],
        "hash_ids": rows.hash_ids is not None and rows.block_size == 16,
        "chat_id": rows.session is not None and rows.session.tolist() == [0, 0],
        "parent_chat_id": rows.session is not None,
        "prompt": rows.texts == ("a", "b"),
        "input_length": rows.num_prompt_tokens.tolist() == [64, 65],
        "output_length": rows.num_output_tokens.tolist() == [4, 5],
    }
    assert rows.ignored_fields == {name for name in lines[0] if not used[name]}
    assert all(any(name in note for note in rows.notes) for name in rows.ignored_fields)
    if "T" in parts:
        assert used["timestamp"]


@pytest.mark.parametrize("name", ["timestamp", "hash_ids", "chat_id"])
@pytest.mark.parametrize("first", [True, False])
def test_a_field_that_only_some_requests_have_is_refused_by_line(write, name, first):
    lines = [LENGTHS[0] | TIMES[0] | HASHES[0] | CHATS[0], LENGTHS[1] | TIMES[1] | HASHES[1] | CHATS[1]]
    del lines[0 if first else 1][name]
    path = write("t.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    if first and name == "chat_id":  # without it the file is Mooncake's, which names no conversations
        assert read_trace(path).ignored_fields == {"chat_id", "parent_chat_id"}
        return
    with pytest.raises(ConfigError, match=f"line 2: .*`{name}`"):
        read_trace(path)


@pytest.mark.parametrize("write_text", WRITERS)
@pytest.mark.parametrize(
    ("name", "text"), [("t.jsonl", MOONCAKE), ("t.csv", AZURE.replace("\r", "")), ("t.jsonl.zst", MOONCAKE)]
)
def test_a_trace_is_the_same_however_its_text_was_written(write_text, name, text, tmp_path, write):
    path = tmp_path / f"other.{name}"
    raw = write_text(text)
    path.write_bytes(zstandard.compress(raw) if name.endswith(".zst") else raw)
    found, plain = read_trace(path), read_trace(write(name, text))
    assert found.timestamp_ns.tolist() == plain.timestamp_ns.tolist()
    assert found.num_prompt_tokens.tolist() == plain.num_prompt_tokens.tolist()


def test_prompts_as_text_have_their_own_or_the_usual_answers_length(write):
    rows = read_trace(write("t.jsonl", '{"prompt": "a", "output_tokens": 9}\n{"prompt": "b"}\n'), None, 33)
    assert rows.texts == ("a", "b")
    assert rows.num_output_tokens.tolist() == [9, 33]


def test_a_servers_log_gives_times_in_seconds(write):
    rows = read_trace(write("t.jsonl", '{"arrival_time": 1.5, "input_toks": 3, "output_toks": 4, "x": 1}\n'))
    assert rows.timestamp_ns.tolist() == [1_500_000_000]


def test_no_more_than_requested_is_read(write):
    assert len(read_trace(write("t.jsonl", MOONCAKE.split("\n", maxsplit=1)[0] + "\nnot looked at\n"), 1)) == 1


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("t.jsonl", "{}\n", r"line 1: its fields are ; expected one of .*Mooncake: timestamp \(milliseconds"),
        ("t.jsonl", "[1]\n", "line 1: expected one JSON object a line"),
        ("t.jsonl", MOONCAKE.replace("7,", '"x",'), r"line 3: Expected `int`.*output_length.*expected Mooncake's"),
        ("t.jsonl", MOONCAKE.replace('"timestamp": 0, ', ""), "line 3: .*missing required field `timestamp`"),
        ("t.jsonl", MOONCAKE.replace(": 7", ": 0"), "line 3: Expected `int` >= 1"),
        ("t.jsonl", MOONCAKE.replace(": 3000", ': "now"'), "line 1: expected a number as the time, got 'now'"),
        (
            "t.jsonl",
            MOONCAKE.replace(": 3000", ": 1764000000000000000"),
            "line 1: the time 1764000000000000000 is too large: is it in a smaller unit",
        ),
        ("t.csv", AZURE.replace("2023-11-16 18:17:04", "9999-11-16 18:17:04"), "is too large"),
        (
            "t.csv",
            AZURE.replace("2023-11-16 18:17:04.0", "today"),
            "line 3: expected a date and time such as .*, got 'today",
        ),
        ("t.csv", AZURE.replace(",3,8", ",3"), "line 3: expected as many fields as the header has"),
        ("t.csv", "input_length,output_length\n", "holds no requests"),
        ("t.jsonl", "", "holds no requests"),
    ],
)
def test_a_broken_trace_is_refused_with_file_line_and_what_is_expected(write, name, text, words):
    with pytest.raises(ConfigError, match=words) as caught:
        read_trace(write(name, text))
    assert name in str(caught.value)


def test_an_unreadable_file_is_the_operators_to_put_right(tmp_path, write):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "missing.jsonl")
    unpacked = write("t.jsonl", MOONCAKE)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(unpacked.rename(unpacked.with_name("t.jsonl.zst")))
    with pytest.raises(ConfigError, match=r"t\.csv\.gz cannot be read: unpack it, or pack it with zstd"):
        read_trace(tmp_path / "t.csv.gz")


@pytest.mark.parametrize(
    ("name", "count", "block_size", "mean_input"),
    [
        ("mooncake_conversation.jsonl.zst", 12_031, 512, 12_035),
        ("mooncake_synthetic.jsonl.zst", 3_993, 512, 15_326),
        ("sharegpt_qwen3_hash16.jsonl.zst", 300, 16, None),
        ("azure2023_code.csv.zst", 8_819, 0, None),
        ("azure2023_conv.csv.zst", 19_366, 0, None),
        ("burstgpt_lengths_8000.csv.zst", 8_000, 0, None),
        ("vllm019_qwen3_30b_a3b_dp2ep2_requests.jsonl.zst", 300, 0, None),
    ],
)
def test_the_published_traces_are_read_whole(name, count, block_size, mean_input):
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"needs the trace {name}, which is not beside this checkout")
    rows = read_trace(path)
    assert len(rows) == count
    assert rows.block_size == block_size
    if mean_input is not None:
        assert rows.num_prompt_tokens.mean() == pytest.approx(mean_input, abs=1)
    if rows.timestamp_ns is not None:
        assert (np.diff(rows.timestamp_ns) >= 0).all()


@pytest.mark.parametrize(
    ("gap", "is_doubted"), [(0.25, True), (1.0, False), (250.5, False)]
)  # seconds; a burst in whole milliseconds; milliseconds with decimals
def test_times_that_look_like_seconds_are_doubted(tmp_path, gap, is_doubted):
    path = tmp_path / "day.jsonl"
    rows = [{"timestamp": gap * at, "input_length": 4, "output_length": 2} for at in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    notes = read_trace(path).notes
    assert bool(notes) == is_doubted
    if is_doubted:
        assert "40 requests come within 0.00975 s: multiply them by 1,000" in notes[0]
