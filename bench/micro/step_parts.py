"""Measures what a decode step costs beside the network, in microseconds of processor time, part by part.

    OMP_NUM_THREADS=1 python bench/micro/step_parts.py --json bench/results/micro/step_parts.json

All figures are processor time of one thread or process, so that other processes on the machine change them little.

- `engine parts`: building a step's tensors (`PagedStep`), sampling, reading the result, and encoding and decoding the
  message with the outputs. The least of many rounds, in one thread, on the demo model's vocabulary.
- `rank loop`: `worker.rank_loop.run_rank` of a `fused` rank, with the real channel to another process. `loop_us` is the
  main thread for a step, with encoding and sending, as the mean of all steps; `median_step_us` is the median, without
  what happens at borders of blocks, once in 16 steps. `channel_us` is the channel's thread. The device sleeps where a
  network would compute, or keeps the core awake; its time does not count. `floor_us` is the same device, and nothing
  but the sending of a message of that size.
- `API server`: the process of `moestro serve` before a paced engine that loads no torch (`--paced-arithmetic none`),
  for one streamed token, from `/proc/PID/task/*/schedstat`. All streams have begun before the count begins. `floor_us`
  is a process that only takes messages of that size at that rate and writes a fixed chunk to each client
  (`bare_forwarder.py`). With `--awake-cores`, no core goes to sleep between two tokens.

`--parts` chooses among them.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import torch

from moestro.config.run_record import run_record
from moestro.core.hashing import hash_key
from moestro.core.load_figures import IDLE
from moestro.core.request import NewOutputs, Request, SamplingParams
from moestro.core.views import LS
from moestro.core.work import LOGITS_LAST, SAMPLING_ROW, BlockMoves, Forward, StepResult, Units
from moestro.engine.rank import build_rank
from moestro.engine.settings import SchedulerSettings
from moestro.model.pools import KVPools
from moestro.model.step import PagedStep, compute_result
from moestro.placement.settings import ExpertLoadSettings
from moestro.wire.messages import Add, Outputs, Shutdown, ToRank, decode_from_rank, encode
from moestro.worker.channel import Channel
from moestro.worker.rank_builder import ExpertCollection
from moestro.worker.rank_loop import SideJobs, run_rank

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save, spread
from shared.server import awake_cores, free_port, moestro

SIZES, REPEATS = (1, 8, 32, 256), 5
CONTEXT, BLOCK_SIZE, VOCABULARY, EXPERTS = 128, 16, 4096, (7, 16)
NUM_STEPS, NUM_WARM, _DEVICE_S = 600, 60, 3e-4
PARTS = ("engine", "loop", "server")
CPU = torch.device("cpu")
# A paced step takes 6 to 25 ms, so that the API server keeps up with all streams.
SERVER_FLAGS = ("qwen3-30b-a3b", "--device", "paced:h100", "--paced-arithmetic", "none", "--max-num-seqs", "256",
                "--log-level", "warning")  # fmt: skip
TOKENS_OF = {1: 400, 8: 200, 32: 150, 256: 60}  # measured tokens of each stream
_BARE_FORWARDER = str(Path(__file__).with_name("bare_forwarder.py"))
_SENDER = """
import socket, sys, time
connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
connection.connect(sys.argv[1])
message, step_s = bytes(int(sys.argv[2])), float(sys.argv[3])
while True:
    time.sleep(step_s)
    connection.send(message)
"""
_SINK = """
import socket, sys
listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
listener.bind(sys.argv[1])
listener.listen()
print("bound", flush=True)
connection, _ = listener.accept()
while connection.recv(1 << 18):
    pass
"""


def least_us(call: Callable[[], object], rounds: int = 300) -> float:
    """Least processor time of one call."""
    best = float("inf")
    for _ in range(rounds):
        started = time.thread_time_ns()
        call()
        best = min(best, time.thread_time_ns() - started)
    return round(best / 1e3, 1)


# --- parts of the engine's step


def decode_units(count: int, temperature: float) -> Units:
    """One token of each of `count` sequences."""
    width = CONTEXT // BLOCK_SIZE + 1
    sampling = np.zeros(count, SAMPLING_ROW)
    sampling["temperature"], sampling["top_p"], sampling["repetition_penalty"] = temperature, 1, 1
    sampling["num_logprobs"] = sampling["num_prompt_logprobs"] = -1
    start = np.full(count, CONTEXT, np.int32)
    return Units(
        slot=np.arange(count, dtype=np.int64),
        serial=np.arange(count),
        service_class=np.full(count, LS, np.uint8),
        start=start,
        num_tokens=np.ones(count, np.int32),
        write_start=start,
        logits=np.full(count, LOGITS_LAST, np.uint8),
        block_tables=np.arange(count * width, dtype=np.int32).reshape(count, width),
        sampling=sampling,
        token_ids=np.arange(count, dtype=np.int32),
    )


def build_step(units: Units, pools: KVPools) -> PagedStep:
    """Build what a network with own kernels reads of a step."""
    step = PagedStep(units, pools, CPU)
    _ = step.input_ids, step.position_ids, step.write_slots, step.layout.addresses
    step.upload(step.logit_rows)
    return step


def outputs_message(count: int) -> Outputs:
    request_ids = tuple(f"cmpl-{i:032x}" for i in range(count))
    return Outputs(NewOutputs((), request_ids, list(range(1000, 1000 + count))), IDLE, 10**15)


@torch.inference_mode()
def engine_row(count: int) -> dict[str, object]:
    """Measure the parts for `count` decodes."""
    pools = KVPools(count * (CONTEXT // BLOCK_SIZE + 1), BLOCK_SIZE)
    logits, expert_counts = torch.randn(count, VOCABULARY), torch.zeros(EXPERTS, dtype=torch.int64)
    greedy, random = (decode_units(count, temperature) for temperature in (0.0, 1.0))
    steps = [build_step(units, pools) for units in (greedy, random)]
    pending = compute_result(steps[0], logits, expert_counts)
    message = outputs_message(count)
    frame = encode(message)
    return {
        "part": "engine parts",
        "sequences": count,
        "paged_step_us": least_us(lambda: build_step(greedy, pools)),
        "sample_greedy_us": least_us(lambda: compute_result(steps[0], logits, expert_counts)),
        "sample_random_us": least_us(lambda: compute_result(steps[1], logits, expert_counts)),
        "read_us": least_us(pending.read),
        "encode_us": least_us(lambda: encode(message)),
        "decode_us": least_us(lambda: decode_from_rank(frame)),
        "message_bytes": len(frame),
    }


# --- the rank's loop


class IdleDevice:
    """Answers each item with token 5 for all units; implements `Device`.

    Args:
        count: Most units of an item.
        is_awake: Whether it keeps the core busy for the time of a step, as a CPU does, or sleeps, as the process of an
            accelerator does. After a sleep, the loop finds caches and clock as other processes and the host left them.

    Attributes:
        busy_ns: Processor time for which it kept the core busy.
    """

    def __init__(self, count: int, *, is_awake: bool) -> None:
        self._is_awake = is_awake
        self._token_ids = np.full(count, 5, np.int32)
        self.busy_ns = 0
        self._results: list[StepResult] = []
        self._counts = np.zeros(EXPERTS, np.int64)

    def launch(self, item: Forward, now_ns: int) -> None:
        slots = item.units.slot
        self._results.append(StepResult(slots, self._token_ids[: len(slots)], expert_counts=self._counts))

    def move_blocks(self, moves: BlockMoves, now_ns: int) -> None:
        raise AssertionError("nothing is preempted")

    def poll(self, now_ns: int) -> list[StepResult]:
        if self._is_awake:
            started_ns = now_ns = time.thread_time_ns()
            while now_ns - started_ns < _DEVICE_S * 1e9:
                now_ns = time.thread_time_ns()
            self.busy_ns += now_ns - started_ns
        else:
            time.sleep(_DEVICE_S)
        results, self._results = self._results, []
        return results

    def ready_at_ns(self) -> int | None:
        return None


class CountingInbox:
    """The channel, with all requests at the start, and a shutdown after `NUM_STEPS` steps; implements `RankInbox`."""

    def __init__(self, channel: Channel, device: IdleDevice, requests: list[Request]) -> None:
        self._channel, self._device, self._requests = channel, device, requests
        self.send = channel.send
        self.owes = True
        self._num_steps = 0
        self.process_ns = 0
        self.marks_ns: list[int] = []  # of the main thread, after each step

    @property
    def num_steps(self) -> int:
        return self._num_steps

    @num_steps.setter
    def num_steps(self, num_steps: int) -> None:
        self._num_steps = self._channel.num_steps = num_steps
        if NUM_WARM <= num_steps <= NUM_WARM + NUM_STEPS:
            self.marks_ns.append(time.thread_time_ns() - self._device.busy_ns)
        sign = {NUM_WARM: -1, NUM_WARM + NUM_STEPS: 1}.get(num_steps, 0)
        if sign:
            self.process_ns += sign * (time.process_time_ns() - self._device.busy_ns)

    def receive(self, wait_s: float | None) -> list[ToRank]:
        if self._requests:
            requests, self._requests = self._requests, []
            return [Add(request) for request in requests]
        received: list[ToRank] = self._channel.receive(wait_s)
        if self._num_steps > NUM_WARM + NUM_STEPS:
            received.append(Shutdown())
        return received

    def has_messages(self) -> bool:
        return self._channel.has_messages()


def decode_request(i: int, num_tokens: int) -> Request:
    key = hash_key("bench", None, str(i))
    sampling = SamplingParams(max_tokens=num_tokens, stop_token_ids=(0,))
    ids = np.full(16, 7, np.int32)
    return Request(
        request_id=f"cmpl-{i:032x}",
        num_prompt_tokens=16,
        sampling=sampling,
        arrival_ns=i,
        token_ids=ids.tobytes(),
        hash_key=key,
    )


def loop_us(channel: Channel, count: int, *, is_awake: bool) -> tuple[float, float, float]:
    """Processor time of a step in the main thread, its mean and median, and the mean in the channel's thread."""
    num_tokens = NUM_WARM + NUM_STEPS + 50
    settings = SchedulerSettings(
        num_blocks=count * (num_tokens // BLOCK_SIZE + 3),
        block_size=BLOCK_SIZE,
        max_model_len=num_tokens + 16,
        max_num_seqs=count,
        max_num_batched_tokens=16 * count,
        max_num_queued_reqs=count + 1,
    )
    device = IdleDevice(count, is_awake=is_awake)
    rank = build_rank(settings, device)
    collection = ExpertCollection(ExpertLoadSettings())
    rank.expert_observer = collection
    inbox = CountingInbox(channel, device, [decode_request(i, num_tokens) for i in range(count)])
    run_rank(rank, inbox, time.monotonic_ns, SideJobs(report_experts=collection.report))
    steps_us = np.diff(inbox.marks_ns) / 1e3
    mean_us = float(steps_us.mean())
    return mean_us, float(np.median(steps_us)), inbox.process_ns / NUM_STEPS / 1e3 - mean_us


@contextlib.contextmanager
def running_sink() -> Iterator[str]:
    """A process that reads all that comes; yields the path of its socket."""
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/sink"
        sink = subprocess.Popen([sys.executable, "-c", _SINK, path], stdout=subprocess.PIPE)
        assert sink.stdout is not None
        sink.stdout.readline()
        try:
            yield path
        finally:
            sink.kill()
            sink.wait()


def bare_loop_us(count: int, *, is_awake: bool) -> float:
    """Processor time of a step that consists of the device and of sending a message of `count` outputs."""
    device, message = IdleDevice(count, is_awake=is_awake), encode(outputs_message(count))
    with running_sink() as path, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(path)
        for step in range(NUM_WARM + NUM_STEPS):
            if step == NUM_WARM:
                started_ns = time.thread_time_ns() - device.busy_ns
            device.poll(0)
            connection.send(message)
        return (time.thread_time_ns() - device.busy_ns - started_ns) / NUM_STEPS / 1e3


def loop_rows() -> Iterator[dict[str, object]]:
    alive, _parent = os.pipe()
    with running_sink() as path:
        channel = Channel(f"ipc://{path}", b"bench", alive)
        try:
            for device, count in product(("asleep", "awake"), SIZES):
                is_awake = device == "awake"
                times = [loop_us(channel, count, is_awake=is_awake) for _ in range(REPEATS)]
                loop, median, rest = map(spread, zip(*times, strict=True))
                floor = spread([bare_loop_us(count, is_awake=is_awake) for _ in range(REPEATS)])
                row = {"part": "rank loop", "device": device, "sequences": count}
                yield {**row, "loop_us": loop, "median_step_us": median, "channel_us": rest, "floor_us": floor}
        finally:
            channel.close()


# --- the API server


def cpu_ns(pid: int) -> int:
    """Processor time of all threads of a process."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))


class StreamClient(asyncio.Protocol):
    """Asks for one stream and counts its events."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.num_events = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.num_events += data.count(b"data: {")


def stream_request(path: str, num_tokens: int, number: int) -> bytes:
    body: dict[str, object] = {"stream": True, "ignore_eos": True, "max_tokens": num_tokens}
    if path.endswith("chat/completions"):
        body["messages"] = [{"role": "user", "content": f"Request {number}"}]
    else:
        body["prompt"] = f"Request {number}"
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    return head.encode() + text


async def token_us(
    url: str, pid: int, path: str, count: int, begin: Callable[[], object] = lambda: None
) -> tuple[float, float]:
    """Processor time of the process `pid` for a token of `count` streams, and the seconds of a step.

    Args:
        begin: Called when all clients are connected.
    """
    where, wanted = urlsplit(url), TOKENS_OF[count]
    loop = asyncio.get_running_loop()
    clients = []
    for number in range(count):
        request = stream_request(path, 3 * wanted + 200, number)
        _, client = await loop.create_connection(
            lambda request=request: StreamClient(request), where.hostname, where.port, family=socket.AF_INET
        )
        clients.append(client)
    begin()

    async def until(reached: Callable[[], bool]) -> tuple[int, int]:
        while not reached():  # noqa: ASYNC110 - an event would cost each token of the load
            await asyncio.sleep(0.005)
        return cpu_ns(pid), sum(client.num_events for client in clients)

    first_cpu, first = await until(lambda: min(client.num_events for client in clients) >= 10)
    began_s = time.monotonic()
    last_cpu, last = await until(lambda: sum(client.num_events for client in clients) - first >= count * wanted)
    step_s = (time.monotonic() - began_s) * count / (last - first)
    for client in clients:
        client.transport.abort()
    return (last_cpu - first_cpu) / (last - first) / 1e3, step_s


def bare_token_us(count: int, step_s: float) -> float:
    """Processor time of `bare_forwarder.py` for a token of `count` streams, one each `step_s`."""
    port, num_bytes, senders = free_port(), len(encode(outputs_message(count))), list[subprocess.Popen[bytes]]()
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/forwarder"
        forwarder = subprocess.Popen([sys.executable, _BARE_FORWARDER, path, str(port)], stdout=subprocess.PIPE)

        def send() -> None:
            command = [sys.executable, "-c", _SENDER, path, str(num_bytes), str(step_s)]
            senders.append(subprocess.Popen(command))

        try:
            assert forwarder.stdout is not None
            forwarder.stdout.readline()
            url = f"http://127.0.0.1:{port}"
            return asyncio.run(token_us(url, forwarder.pid, "/v1/completions", count, send))[0]
        finally:
            for process in (*senders, forwarder):
                process.kill()
                process.wait()


def server_rows(repeats: int) -> Iterator[dict[str, object]]:
    port = free_port()
    with moestro(port, *SERVER_FLAGS, OMP_NUM_THREADS="1") as server:
        assert server.process is not None
        for path in ("/v1/completions", "/v1/chat/completions"):
            for count in SIZES:
                found = []
                for _ in range(repeats):
                    found.append(asyncio.run(token_us(server.url, server.process.pid, path, count)))
                    server.wait_until_idle()
                step_s = sorted(step_s for _, step_s in found)[len(found) // 2]
                floor = spread([bare_token_us(count, step_s) for _ in range(repeats)])
                row = {"part": "API server", "path": path, "sequences": count, "step_ms": round(step_s * 1e3, 2)}
                yield {**row, "token_us": spread([us for us, _ in found]), "floor_us": floor}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--repeats", type=int, default=REPEATS, help="runs of each load of the API server")
    parser.add_argument("--awake-cores", action="store_true", help="keep all cores awake beside the API server")
    args = parser.parse_args()
    conditions = run_record("measured")
    gc.freeze()  # as `worker.worker` does: a full collection would look at the objects of all libraries
    ways: dict[str, Callable[[], Iterator[dict[str, object]]]] = {
        "engine": lambda: map(engine_row, SIZES), "loop": loop_rows, "server": lambda: server_rows(args.repeats),
    }  # fmt: skip
    rows = []
    for part in args.parts:
        is_awake = args.awake_cores and part == "server"
        with awake_cores() if is_awake else contextlib.nullcontext():
            for row in ways[part]():
                rows.append({**row, "cores": "awake"} if is_awake else row)
                print(json.dumps(rows[-1]), flush=True)
    save(args.json, conditions, {"num_threads": torch.get_num_threads(), "rows": rows})


if __name__ == "__main__":
    main()
