"""A tokenizer.json that makes gigabytes of one letter is refused within seconds, and signals end the start."""

from __future__ import annotations

import json
import shutil
import time

import psutil
import pytest
from support.running import REAL, Running, run_command, wait_until

MANY = [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}] * 9
SPACED = [{"type": "Replace", "pattern": {"Regex": ""}, "content": "aaa"}] * 9
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
AROUND = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 1000,
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {},
}
BOMBS = {
    "normalizer": ({"normalizer": {"type": "Sequence", "normalizers": MANY}}, "the normalizer in "),
    "regular expressions": ({"normalizer": {"type": "Sequence", "normalizers": SPACED}}, "the normalizer in "),
    "within": (
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": MANY}]}},
        "may make 1e+09 characters of one; the limit is 256",
    ),
    "decoder": ({"decoder": {"type": "Sequence", "decoders": MANY}}, "the decoder in "),
    "prefix": ({"normalizer": {"type": "Prepend", "prepend": "b" * 1_000_000}}, "makes 1,000,001 characters of "),
    "bytes": (
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 40}},
        "takes more than 10 s or 3072 MiB of memory",
    ),
    "tokens around": ({"post_processor": AROUND}, "makes 1,000 tokens of "),
}


def lie(demo_dir, tmp_path, changes):
    checkpoint = shutil.copytree(demo_dir, tmp_path / "checkpoint")
    path = checkpoint / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return (*REAL, str(checkpoint), "--kv-cache-memory-bytes", "50000000")


@pytest.mark.parametrize("name", BOMBS)
def test_a_tokenizer_whose_texts_grow_is_refused_at_the_start(demo_dir, tmp_path, name):
    changes, reason = BOMBS[name]
    done = run_command(lie(demo_dir, tmp_path, changes))
    assert (done.returncode, reason in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()[-1]) < 600


def test_a_signal_ends_a_start_whose_tokenizer_never_ends(demo_dir, tmp_path):
    changes, _ = BOMBS["bytes"]
    server = Running(lie(demo_dir, tmp_path, changes), tmp_path, wait=False)
    try:
        process = psutil.Process(server.process.pid)
        wait_until(lambda: any(each.cpu_times().user > 0.5 for each in process.children() if is_fork(each, process)))
        began = time.monotonic()
        server.stop()
        assert time.monotonic() - began < 15
    finally:
        server.kill()


def is_fork(each, parent) -> bool:
    return each.cmdline() == parent.cmdline()
