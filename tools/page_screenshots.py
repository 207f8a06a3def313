"""Takes the pictures of the page at `/` for docs/images, from real servers under load. Needs Chromium.

    .venv/bin/python tools/page_screenshots.py

The server has the demo model and two engines. Behind the router are three paced servers, whose durations are modelled.
"""

from __future__ import annotations

import contextlib
import io
import random
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.browser import chromium  # noqa: E402
from support.running import MOESTRO, Running, call, free_port  # noqa: E402

IMAGES = ROOT / "docs" / "images"
WIDE, TALL, PHONE = ({"width": width, "height": height} for width, height in ((1200, 740), (1200, 960), (375, 760)))
PACED = ("serve", "qwen3-30b-a3b", "--device", "paced:h20", "--paced-arithmetic", "none")
SHARED = [
    " ".join(random.Random(seed).choices(["the", "router", "sends", "each", "request", "to", "one", "engine"], k=400))
    for seed in range(6)
]
CODE = [
    "def read_file(path):\n",
    "class Queue:\n    def __init__(self",
    "import os\n\ndef walk(",
    "for line in lines:\n    ",
]


@contextlib.contextmanager
def started(*command: str, admin_port: int | None = None) -> Iterator[Running]:
    with tempfile.TemporaryDirectory() as directory:
        running = Running((MOESTRO, *command), Path(directory), admin_port=admin_port)
        try:
            yield running
        finally:
            running.stop()


@contextlib.contextmanager
def under_load(server: Running, num_users: int, prompts: list[str], num_tokens: tuple[int, int]) -> Iterator[None]:
    """Users who send one completion after another until the block ends."""
    is_over = threading.Event()

    def user(seed: int) -> None:
        draw = random.Random(seed)
        while not is_over.is_set():
            prompt = f"{draw.choice(prompts)}# {draw.randrange(50)}\n"
            body = {"model": None, "prompt": prompt, "max_tokens": draw.randint(*num_tokens), "ignore_eos": True}
            call(server, "POST", "/v1/completions", {key: value for key, value in body.items() if value is not None})

    users = [threading.Thread(target=user, args=(seed,)) for seed in range(num_users)]
    for each in users:
        each.start()
    try:
        yield
    finally:
        is_over.set()
        for each in users:
            each.join()


class Camera:
    """Opens pages and keeps their pictures."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser

    @contextlib.contextmanager
    def page(self, url: str, scheme: str, size: dict[str, int] = WIDE) -> Iterator[Any]:
        context = self._browser.new_context(viewport=size, color_scheme=scheme)
        page = context.new_page()
        page.goto(url)
        yield page
        context.close()

    def take(self, page: Any, name: str) -> None:
        """Save what is seen, with 256 colours; the rare ones, such as those of dots, are kept."""
        seen = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        picture = seen.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        picture.save(IMAGES / f"{name}.png", optimize=True)
        print(name, (IMAGES / f"{name}.png").stat().st_size)


def complete(page: Any, text: str) -> None:
    page.locator("#model option").first.wait_for(state="attached")
    page.locator("#prompt").fill(text)
    page.locator("#prompt").press("Enter")
    page.locator(".answer[data-ended]").last.wait_for()


def of_server(camera: Camera) -> None:
    with started("serve", "--engines", "2", "--kv-cache-memory-bytes", "20000000") as server:
        for scheme, size, name in (("light", WIDE, "page-chat"), ("dark", PHONE, "page-chat-phone")):
            with camera.page(server.url, scheme, size) as page:
                complete(page, "def read_file(path):\n")
                page.locator("#prompt").fill("class Queue:\n    def __init__(self")
                camera.take(page, name)
        with under_load(server, 24, CODE, (30, 160)), contextlib.ExitStack() as stack:
            views = [("dark", TALL, "page-engines"), ("light", PHONE, "page-engines-phone")]
            opened = [(stack.enter_context(camera.page(f"{server.url}#engines", *view[:2])), view[2]) for view in views]
            time.sleep(25)
            for page, name in opened:
                camera.take(page, name)


def of_router(camera: Camera) -> None:
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(started(*PACED)) for _ in range(3)]
        named = [
            part for name, each in zip("abc", engines, strict=True) for part in ("--engine", f"gpu-{name}={each.url}")
        ]
        admin_port = free_port()
        router = stack.enter_context(started("route", *named, admin_port=admin_port))
        assert re.search(f":{admin_port}/admin/engines", router.text)
        operators = f"http://127.0.0.1:{admin_port}/"
        stack.enter_context(under_load(router, 20, SHARED, (60, 400)))
        page = stack.enter_context(camera.page(f"{operators}#engines", "light"))
        time.sleep(20)
        page.get_by_role("button", name="Drain gpu-c").click()
        time.sleep(10)
        camera.take(page, "page-route-engines")
        for scheme, size, name in (("dark", WIDE, "page-decisions"), ("light", PHONE, "page-decisions-phone")):
            with camera.page(f"{operators}#decisions", scheme, size) as each:
                each.locator(".outcome.ok").first.wait_for()
                each.locator(".decision:has(.outcome.ok)").first.locator("summary").click()
                camera.take(each, name)
        with camera.page(router.url, "dark") as each:
            each.locator("#api").select_option("chat")
            each.locator("#max-tokens").evaluate("box => { box.value = 120; }")
            complete(each, "Why did this request go where it went?")
            camera.take(each, "page-route-chat")


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with chromium() as browser:
        camera = Camera(browser)
        of_server(camera)
        of_router(camera)


if __name__ == "__main__":
    main()
