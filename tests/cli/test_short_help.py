"""`--help` of a verb with many flags is short, and `--help-all` has every flag; a full disk is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moestro.cli.main import EVERYDAY, HELP_ALL, main

MOST_LINES = {"serve": 300, "route": 150}


def help_of(verb: str, flag: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit_:
        main([verb, flag])
    assert exit_.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("verb", EVERYDAY)
def test_short_help_has_the_everyday_flags_and_no_other(verb, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    text = help_of(verb, "--help", capsys)
    lines = [line.split() for line in text.splitlines() if "--" in line]
    shown = {word for words in lines for word in words[:3] if word.startswith("--") and word != HELP_ALL}
    assert {flag for flag in shown if not flag.startswith("--no-")} == set(EVERYDAY[verb])
    assert f"moestro {verb} {HELP_ALL} lists all flags" in text


@pytest.mark.parametrize("verb", EVERYDAY)
def test_short_help_fits_on_few_screens(verb, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert len(help_of(verb, "--help", capsys).splitlines()) <= MOST_LINES[verb]


@pytest.mark.parametrize("verb", EVERYDAY)
def test_all_flags_come_back_after_a_short_help(verb, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    help_of(verb, "--help", capsys)
    everything = help_of(verb, HELP_ALL, capsys)
    assert "--index-memory-bytes" in everything or "--max-be-wait" in everything
    assert HELP_ALL not in everything


def test_policies_are_named_in_short_help_and_described_in_the_other(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert "One of edf, fcfs, prefill_aware" in help_of("serve", "--help", capsys)
    assert "fcfs: First come, first served." in help_of("serve", HELP_ALL, capsys)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_output_that_cannot_be_written_ends_with_a_sentence():
    code = "from moestro.cli.main import main; main(['--version'])"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "moestro: the output cannot be written: No space left on device\n")
