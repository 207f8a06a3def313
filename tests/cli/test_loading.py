"""The sign that libraries load."""

from __future__ import annotations

import gc
import io

from moestro.cli.app import loading, uncollected


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_that_libraries_load(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with loading("the server"):
        pass
    assert "Loading the server …" in terminal.getvalue()


def test_a_file_gets_nothing(monkeypatch):
    file = io.StringIO()
    monkeypatch.setattr("sys.stderr", file)
    with loading("the server"):
        pass
    assert file.getvalue() == ""


def test_the_collector_runs_again_after_imports():
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
