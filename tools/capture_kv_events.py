"""Record what a real vLLM server publishes of its prefix cache, beside what it says it found there: a test's fixture.

    python tools/capture_kv_events.py --vllm /path/to/venv/bin/vllm --out tests/wire/fixtures/vllm_0.32_int.jsonl

Starts vLLM on the demo model with a small KV cache and sends it conversations, salted and random prompts, so that
blocks are stored, hit and evicted. In between, connections are closed and a message is thrown away, as if lost; the
cache is reset; the server is killed and started again. Each line of the file is one thing that happened, in order:
`connected`, `disconnected`, `live` and `replayed` with the frames as they came (base64), `lost` (a live message thrown
away), and `request` with the prompt's token ids, its salt, the messages that it was made of and vLLM's own count of
tokens found in its cache.

Nothing of Moestro is imported: the file shows what vLLM does, and the test shows what Moestro makes of it.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import random
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import zmq

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "src" / "moestro" / "assets" / "demo"
PORT, EVENTS_PORT, REPLAY_PORT = 8131, 8132, 8133
BLOCK_SIZE = 32
NUM_BLOCKS = 18  # one of them is never given out
MAX_LEN = 512
SETTLE_S = 0.4  # for events to arrive
TURNS = ("def add(a, b):", "now write a test of it", "and one that fails, with a docstring that says why")


class Server:
    """A vLLM server of its own process group."""

    def __init__(self, vllm: str, *, int_hashes: bool) -> None:
        events = {
            "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{EVENTS_PORT}",
            "replay_endpoint": f"tcp://*:{REPLAY_PORT}", "topic": "kv@e1@m",
        }  # fmt: skip
        environment = os.environ | {
            "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": str(int(int_hashes)),
            "PATH": f"{Path(vllm).parent}:{os.environ['PATH']}",
        }  # fmt: skip
        command = [
            vllm, "serve", str(DEMO), "--host", "127.0.0.1", "--port", str(PORT), "--served-model-name", "m",
            "--dtype", "bfloat16", "--max-model-len", str(MAX_LEN), "--enforce-eager", "--enable-prefix-caching",
            "--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", str(NUM_BLOCKS),
            "--enable-prompt-tokens-details", "--kv-events-config", json.dumps(events),
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        for _ in range(600):
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health").close()
                return
            assert self._process.poll() is None, "vLLM ended before it was ready"
            time.sleep(0.5)
        raise SystemExit("vLLM did not get ready")

    def kill(self) -> None:
        """At once, and all of it."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Recorder:
    """Listens, asks, and writes down."""

    def __init__(self, out: Path) -> None:
        self._context = zmq.Context()
        self._out = out.open("w")
        self._sub: zmq.Socket | None = None
        self.next_seq = 0

    def write(self, at: str, **what: object) -> None:
        self._out.write(json.dumps({"at": at} | what) + "\n")
        self._out.flush()

    def connect(self) -> None:
        self._sub = self._context.socket(zmq.SUB)
        self._sub.subscribe("")
        self._sub.connect(f"tcp://127.0.0.1:{EVENTS_PORT}")
        time.sleep(SETTLE_S)
        self.write("connected")

    def disconnect(self) -> None:
        self._sub.close()
        self.write("disconnected")

    def listen(self, *, lose: int = 0) -> None:
        """Write down what has come; the first `lose` messages count as lost."""
        while self._sub.poll(SETTLE_S * 1000):
            frames = self._sub.recv_multipart()
            self.write("lost" if lose > 0 else "live", frames=_text(frames))
            lose -= 1
            self.next_seq = int.from_bytes(frames[1], "big") + 1

    def replay(self, start: int) -> None:
        dealer = self._context.socket(zmq.DEALER)
        dealer.connect(f"tcp://127.0.0.1:{REPLAY_PORT}")
        dealer.send_multipart([b"", start.to_bytes(8, "big")])
        while dealer.poll(5000):
            frames = dealer.recv_multipart()
            self.write("replayed", frames=_text(frames))
            if not frames[-1]:
                break
            self.next_seq = int.from_bytes(frames[-2], "big") + 1
        dealer.close()

    def request(self, path: str, body: dict, note: dict | None = None) -> str:
        answer = _post(path, body | {"model": "m", "temperature": 0, "return_token_ids": True})
        choice, usage = answer["choices"][0], answer["usage"]
        token_ids = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        salt = body.get("cache_salt")
        self.write("request", token_ids=token_ids, salt=salt, cached_tokens=cached, **(note or {}))
        return choice["message"]["content"] if "message" in choice else choice["text"]

    def chat(self, messages: list[dict], salt: str | None = None) -> str:
        body = {"messages": messages, "max_tokens": 40} | ({"cache_salt": salt} if salt else {})
        return self.request("/v1/chat/completions", body, {"messages": list(messages)})

    def random_prompt(self, seed: int, num_tokens: int) -> None:
        draw = random.Random(seed)
        token_ids = [draw.randrange(10, 4000) for _ in range(num_tokens)]
        self.request("/v1/completions", {"prompt": token_ids, "max_tokens": 2})


def _text(frames: list[bytes]) -> list[str]:
    return [base64.b64encode(frame).decode() for frame in frames]


def _post(path: str, body: dict | None = None) -> dict:
    data = b"" if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        text = response.read()
    return json.loads(text) if text else {}


def conversation(recorder: Recorder) -> list[dict]:
    messages: list[dict] = []
    for turn in TURNS:
        messages.append({"role": "user", "content": turn})
        messages.append({"role": "assistant", "content": recorder.chat(messages)})
        recorder.listen()
    return messages[:-1]


def scenario(recorder: Recorder, vllm: str, *, int_hashes: bool) -> None:
    """What the file tells; see the module's first lines."""
    server = Server(vllm, int_hashes=int_hashes)
    recorder.connect()
    recorder.replay(0)
    messages = conversation(recorder)
    for _ in range(2):
        recorder.chat(messages[:3], salt="tenant")
        recorder.listen()
    for seed in range(2):  # these push out what is oldest
        recorder.random_prompt(seed, 5 * BLOCK_SIZE)
        recorder.listen()
    recorder.chat(messages)
    recorder.listen()
    recorder.random_prompt(2, 2 * BLOCK_SIZE + 3)
    start = recorder.next_seq
    recorder.listen(lose=1)
    recorder.random_prompt(3, BLOCK_SIZE + 3)
    recorder.listen()
    recorder.replay(start - 1)
    recorder.disconnect()
    recorder.random_prompt(4, 3 * BLOCK_SIZE)
    recorder.connect()
    recorder.replay(recorder.next_seq - 1)
    recorder.random_prompt(3, BLOCK_SIZE + 3)
    recorder.listen()
    _post("/reset_prefix_cache")
    recorder.random_prompt(5, 2 * BLOCK_SIZE)
    recorder.listen()
    server.kill()
    recorder.disconnect()
    server = Server(vllm, int_hashes=int_hashes)
    recorder.random_prompt(6, 2 * BLOCK_SIZE)
    recorder.connect()
    recorder.replay(recorder.next_seq - 1)
    recorder.replay(0)
    recorder.random_prompt(6, 3 * BLOCK_SIZE)
    recorder.listen()
    server.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="the vllm command")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--bytes", action="store_true", help="block hashes as bytes, not as integers")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    scenario(Recorder(options.out), options.vllm, int_hashes=not options.bytes)


if __name__ == "__main__":
    main()
