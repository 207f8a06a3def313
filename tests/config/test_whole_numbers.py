"""Whole numbers may have a suffix in flags, environment variables and files, as in vLLM."""

from __future__ import annotations

import pytest

from moestro.cli import main


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    """Settings that `moestro serve --print-config` shows, by name."""
    with pytest.raises(SystemExit) as ended:
        main(["serve", *arguments, "--print-config"])
    assert ended.value.code == 0
    lines = (line.split("  #")[0] for line in capsys.readouterr().out.splitlines())
    return dict(line.split(": ", 1) for line in lines if ": " in line)


@pytest.mark.parametrize(
    ("written", "number"),
    [("8k", 8_000), ("8K", 8_192), ("25.6k", 25_600), ("2m", 2_000_000), ("2M", 1 << 21), ("1.5g", 1_500_000_000),
     ("2G", 1 << 31), ("1T", 1 << 40), ("4096", 4_096)],
)  # fmt: skip
def test_flags_take_suffixes(capsys: pytest.CaptureFixture[str], written: str, number: int):
    assert printed(capsys, "--kv-cache-memory-bytes", written)["kv_cache_memory_bytes"] == str(number)


@pytest.mark.parametrize("word", ["auto", "-1"])
def test_a_limit_that_the_model_decides_is_unset(capsys: pytest.CaptureFixture[str], word: str):
    assert printed(capsys, f"--max-model-len={word}")["max_model_len"] == "null"
    assert printed(capsys, "--max-model-len", "9", "--max-model-len", word)["max_model_len"] == "null"


def test_environment_and_files_take_suffixes(
    capsys: pytest.CaptureFixture[str], tmp_path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "serve.yaml"
    path.write_text("max-model-len: 4k\n")
    monkeypatch.setenv("MOESTRO_MAX_NUM_BATCHED_TOKENS", "2K")
    settings = printed(capsys, "--config", str(path))
    assert settings["max_model_len"] == "4000"
    assert settings["max_num_batched_tokens"] == "2048"


@pytest.mark.parametrize(
    ("flag", "written", "reported"),
    [
        ("--max-model-len", "1.5K", "1.5k counts in powers of 1,000"),
        ("--max-model-len", "1.0001k", "must be a whole number, got 1000.1"),
        ("--max-model-len", "3MB", "3MB"),
        ("--max-model-len", "0k", "must be at least 1, got 0"),
        ("--kv-offloading-size", "8k", "8k"),  # GiB, no whole number
    ],
)
def test_other_numbers_are_refused(capsys: pytest.CaptureFixture[str], flag: str, written: str, reported: str):
    with pytest.raises(SystemExit) as ended:
        main(["serve", flag, written, "--print-config"])
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert reported in " ".join((captured.out + captured.err).split())
