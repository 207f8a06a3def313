"""A real Envoy with the configuration that docs/envoy.md prints; only its ports differ."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from endpoint_picker.pickers import start
from gateway.rig import CHAT, Answer, Caller
from support.running import PATIENCE_S, envoy_binary, free_port

PAGE = Path(__file__).parents[2] / "docs" / "envoy.md"
Edit = Callable[[str], str]


def printed_configuration() -> str:
    found = re.search(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found
    return found[1]


class Envoy:
    """A running Envoy."""

    def __init__(self, port: int, log: Path) -> None:
        self.port, self.log = port, log

    @property
    def text(self) -> str:
        return self.log.read_text()

    async def caller(self) -> Caller:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24)
        return Caller(reader, writer)

    async def call(self, path: str = CHAT, body: object = None, method: str = "POST", **headers: str) -> Answer:
        """One request on a connection of its own."""
        caller = await self.caller()
        chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        caller.ask(path, chat if body is None else body, method, **headers)
        async with asyncio.timeout(PATIENCE_S):
            answer = await caller.answer(is_head=method == "HEAD")
        caller.hang_up()
        return answer


@contextlib.asynccontextmanager
async def running_envoy(
    directory: Path,
    picker_port: int,
    engine_ports: Sequence[int],
    edit: Edit = str,
) -> AsyncIterator[Envoy]:
    """An Envoy before two engines, whose printed configuration `edit` may change."""
    program = envoy_binary()
    assert program is not None
    port = free_port()
    printed = {10000: port, 9002: picker_port, 8001: engine_ports[0], 8002: engine_ports[-1]}
    text = printed_configuration()
    for number in printed:
        assert text.count(f"port_value: {number}") == 1
    text = re.sub(r"port_value: (\d+)", lambda found: f"port_value: {printed[int(found[1])]}", text)
    config, log = directory / f"envoy-{port}.yaml", directory / f"envoy-{port}.log"
    config.write_text(edit(text))
    command = [str(program), "-c", str(config), "--concurrency", "1", "--use-dynamic-base-id", "-l", "warning"]
    process = start([*command, "--drain-time-s", "1"], log)
    try:
        envoy = Envoy(port, log)
        await _until_open(envoy, process.poll)
        yield envoy
    finally:
        process.kill()
        process.wait()


async def _until_open(envoy: Envoy, poll: Callable[[], int | None]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and poll() is None:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", envoy.port)
            writer.close()
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"Envoy did not start:\n{envoy.text}")
