"""A checkpoint that lies: the stranger publishes it, and the operator serves it.

Each lie is served by `moestro serve` under a limit of memory. It must end with status 2 and one sentence, without a
traceback, within the time and memory of a start; or serve. Figures: for each lie the status ("serves", "hangs"), the
seconds, the peak of the resident memory of all processes in MB, whether the output has a traceback, and its last line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
from frame import Place, run
from shared.server import MOESTRO, free_port

from moestro.config.checkpoint_directory import locate_model
from moestro.model.settings import DEMO_MODEL

MEMORY_BYTES = 8 << 30  # address space of each process, so that the machine survives
PATIENCE_S = 60.0
Lie = Callable[[Path], object]


def config(**changes: object) -> Lie:
    """Return the lie that changes fields of config.json."""

    def tell(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return tell


def header(change: Callable[[dict], object]) -> Lie:
    """Return the lie that changes the header of the weights, and leaves their bytes."""

    def tell(directory: Path) -> None:
        path = directory / "model.safetensors"
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        entries = json.loads(raw[8 : 8 + length])
        change(entries)
        new = json.dumps(entries).encode()
        path.write_bytes(struct.pack("<Q", len(new)) + new + raw[8 + length :])

    return tell


def fill(name: str, value: bytes) -> Lie:
    """Return the lie that repeats two bytes, a number in bfloat16, in place of a tensor."""

    def tell(directory: Path) -> None:
        path = directory / "model.safetensors"
        raw = bytearray(path.read_bytes())
        (length,) = struct.unpack("<Q", raw[:8])
        begin, end = json.loads(raw[8 : 8 + length])[name]["data_offsets"]
        raw[8 + length + begin : 8 + length + end] = value * ((end - begin) // 2)
        path.write_bytes(raw)

    return tell


def huge(name: str, num_bytes: int) -> Lie:
    """Return the lie that makes a JSON file huge."""

    def tell(directory: Path) -> None:
        path = directory / name
        fields = json.loads(path.read_text()) if path.exists() else {}
        if name == "tokenizer.json":
            fields["model"]["vocab"] |= {f"long{n:032}": n + 5000 for n in range(num_bytes // 50)}
        else:
            fields["padding"] = "x" * num_bytes
        path.write_text(json.dumps(fields))

    return tell


def bomb(part: str, steps: str) -> Lie:
    """Return the lie whose tokenizer makes 10^9 letters of one."""

    def tell(directory: Path) -> None:
        path = directory / "tokenizer.json"
        many = [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}] * 9
        path.write_text(json.dumps(json.loads(path.read_text()) | {part: {"type": "Sequence", steps: many}}))

    return tell


def kind(name: str, make: Callable[[Path], object]) -> Lie:
    """Return the lie that puts another kind of file in place of `name`."""

    def tell(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        make(directory / name)

    return tell


LIES: dict[str, tuple[Lie, tuple[str, ...]]] = {
    "10,000 layers": (config(num_hidden_layers=10_000), ()),
    "10^12 layers": (config(num_hidden_layers=10**12), ()),
    "10,000 layers, dummy": (config(num_hidden_layers=10_000), ("--load-format", "dummy")),
    "0 layers": (config(num_hidden_layers=0), ()),
    "-1 layers": (config(num_hidden_layers=-1), ()),
    "0 heads": (config(num_attention_heads=0), ()),
    "5,000 experts": (config(num_local_experts=5000), ()),
    "10^9 letters of one, encoded": (bomb("normalizer", "normalizers"), ()),
    "10^9 letters of one, decoded": (bomb("decoder", "decoders"), ()),
    "10^12 labels": (config(num_labels=10**12), ()),
    "17 of 16 experts": (config(num_experts_per_tok=17), ()),
    "vocabulary of 10^6": (config(vocab_size=10**6), ()),
    "negative end token": (config(eos_token_id=-1), ()),
    "NaN epsilon": (config(rms_norm_eps=float("nan")), ()),
    "tokenizer.json of 300 MB": (huge("tokenizer.json", 300 << 20), ()),
    "tokenizer_config.json of 100 MB": (huge("tokenizer_config.json", 100 << 20), ()),
    "dangling link": (kind("model.safetensors", lambda path: path.symlink_to("gone")), ()),
    "FIFO of tokenizer_config.json": (kind("tokenizer_config.json", os.mkfifo), ()),
    "FIFO of weights": (kind("model.safetensors", os.mkfifo), ()),
    "header of 2^60 bytes": (lambda d: _patch(d / "model.safetensors", 0, struct.pack("<Q", 1 << 60)), ()),
    "tensor beyond the file": (header(lambda entries: _move(entries, 1 << 50)), ()),
    "tensor of 2^62 elements": (header(lambda entries: _of(entries).update(shape=[1 << 31, 1 << 31])), ()),
    "NaN norm": (fill("model.norm.weight", b"\xc0\x7f"), ()),
    "infinite norm, async": (
        fill("model.layers.3.input_layernorm.weight", b"\x80\x7f"),
        ("--mode", "async", "--attention", "1", "--experts", "2"),
    ),
    "NaN gate, ep": (
        fill("model.layers.3.mlp.gate.weight", b"\xc0\x7f"),
        ("--mode", "ep", "--engines", "2"),
    ),
}


def _patch(path: Path, at: int, new: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(new)


def _of(entries: dict) -> dict:
    return entries["model.norm.weight"]


def _move(entries: dict, by: int) -> None:
    entry = _of(entries)
    entry["data_offsets"] = [at + by for at in entry["data_offsets"]]


async def attack(place: Place) -> dict[str, object]:
    """Serve each lie in turn."""
    return {name: await asyncio.to_thread(_serve, place, name) for name in LIES}


def _serve(place: Place, name: str) -> dict[str, object]:
    lie, flags = LIES[name]
    directory = place.directory / "checkpoint"
    shutil.copytree(locate_model(DEMO_MODEL), directory)
    lie(directory)
    port = free_port()
    command = [MOESTRO, "serve", str(directory), "--port", str(port), "--kv-cache-memory-bytes", "50M", *flags]
    there = os.environ | {"PYTHONPATH": str(place.source), "TMPDIR": str(place.directory), "OMP_NUM_THREADS": "1"}
    log = place.directory / "lie.log"
    began = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=there, start_new_session=True)
        resource.prlimit(process.pid, resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))  # Its children inherit it.
    status, peak = _watch(process, port, began)
    seconds = time.monotonic() - began
    _end(process)
    text = log.read_text(errors="replace").strip()
    log.unlink()  # The frame counts the tracebacks of logs that are left.
    shutil.rmtree(directory)
    return {
        "status": status,
        "s": round(seconds, 1),
        "peak_MB": round(peak / 1e6),
        "has_traceback": "Traceback" in text,
        "last_line": text.splitlines()[-1][:300] if text and status != "serves" else "",
    }


def _watch(process: subprocess.Popen[bytes], port: int, began: float) -> tuple[int | str, int]:
    """Return how the server ended, and the peak of its processes' memory."""
    peak = 0
    while time.monotonic() < began + PATIENCE_S:
        peak = max(peak, _resident(process.pid))
        if process.poll() is not None:
            return process.returncode, peak
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                return "serves", peak
        except OSError:
            time.sleep(0.05)
    return "hangs", peak


def _resident(pid: int) -> int:
    total = 0
    try:
        found = psutil.Process(pid)
        family = [found, *found.children(recursive=True)]
    except psutil.Error:
        return 0
    for each in family:
        try:
            total += each.memory_info().rss
        except psutil.Error:
            continue
    return total


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    run(attack, __doc__)
