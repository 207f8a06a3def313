"""A router follows a real server's KV events beside strangers at both of the engine's ports."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

from support.kv_listener import DEMO, Listener, free_ports, names, publishing_config
from support.published import raw_peer, request
from support.running import MOESTRO, Running, complete, metrics, wait_until

PROMPTS = [f"def function_{number}(x):\n    return x * {number}\n" * 6 for number in range(12)]
FRAME = b"\x03" + (4096).to_bytes(8, "big") + bytes(4096)


def endless(events: int, replay: int, is_over: threading.Event) -> None:
    """Messages whose frames never end, at both ports."""
    while not is_over.is_set():
        for port, kind in ((events, b"SUB"), (replay, b"DEALER")):
            with contextlib.suppress(OSError), raw_peer(port, kind) as peer:
                for _ in range(100):
                    peer.sendall(FRAME)


def replays(_: int, replay: int, is_over: threading.Event) -> None:
    """Requests for replays without end, all of which are read."""
    while not is_over.is_set():
        with contextlib.suppress(OSError), raw_peer(replay, b"DEALER", request(0) * 100) as peer:
            while not is_over.is_set() and peer.recv(1 << 20):
                pass


def silent(events: int, replay: int, is_over: threading.Event) -> None:
    """Idle connections, and replays that nothing reads."""
    with contextlib.ExitStack() as held:
        for _ in range(40):
            for port in (events, replay):
                held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=300))
            with contextlib.suppress(OSError):
                held.enter_context(raw_peer(replay, b"DEALER", request(0) * 100, receive_bytes=4096))
        is_over.wait()


@contextlib.contextmanager
def beside(*strangers: Callable[[int, int, threading.Event], None], ports: tuple[int, int]) -> Iterator[None]:
    is_over = threading.Event()
    threads = [threading.Thread(target=each, args=(*ports, is_over)) for each in strangers]
    for each in threads:
        each.start()
    try:
        yield
    finally:
        is_over.set()
        for each in threads:
            each.join()


def test_the_index_of_a_router_stays_complete_beside_strangers(real_command, tmp_path):
    ports = free_ports(1)
    for name in ("serve", "route"):
        (tmp_path / name).mkdir()
    config = ("--kv-events-config", publishing_config(ports), "--block-size", "16")
    server = Running((*real_command, *config), tmp_path / "serve")
    flags = (
        *("--engine", f"e={server.url}", "--admin-port", "0", "--route-policy", "lmetric"),
        *("--tokenizer", str(DEMO), "--block-size", "16"),
        *("--kv-events", f"e=tcp://127.0.0.1:{ports[0]}", "--kv-replay", f"e=tcp://127.0.0.1:{ports[1]}"),
    )
    router = listener = None

    def figure(name: str) -> float:
        assert router is not None
        return metrics(router).get(f'moestro:route_kv_{name}{{engine="e"}}', -1)

    try:
        complete(server, prompt=PROMPTS[0], max_tokens=1)  # before the router comes: a replay brings it
        with beside(endless, replays, replays, silent, ports=ports):
            router = Running((MOESTRO, "route", *flags), tmp_path / "route")
            wait_until(lambda: figure("complete") == 1 and figure("blocks") > 0)
            for prompt in PROMPTS[1:]:
                assert complete(router, prompt=prompt, max_tokens=4).status == 200
                assert figure("complete") == 1
        listener = Listener(*ports)
        wait_until(lambda: set().union(*map(names, PROMPTS)) <= listener.held)
        wait_until(lambda: figure("blocks") == len(listener.held))
        assert (figure("losses_total"), figure("illegible_events_total"), figure("complete")) == (0, 0, 1)
    finally:
        for each in (listener,) if listener else ():
            each.close()
        for each in (router, server):
            if each is not None:
                each.kill()
    for name in ("serve", "route"):
        assert "Traceback" not in (tmp_path / name / "log").read_text()
