"""Headless Chromium, as Debian and Ubuntu package it, driven by Playwright."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
CHROMIUM = os.environ.get("MOESTRO_TEST_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None,
    reason="there is no Chromium: apt-get install chromium, or name one in MOESTRO_TEST_CHROMIUM",
)


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A running browser of Playwright's synchronous API."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - only where a browser is needed

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()
