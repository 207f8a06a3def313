"""Files that a verb writes at its end are checked before its work."""

from __future__ import annotations

import os

import pytest

from moestro.config.user_files import check_files, check_folder
from moestro.errors import ConfigError


def test_files_that_can_be_written_pass_and_none_is_made(tmp_path):
    (tmp_path / "old.json").write_text("{}")
    check_files({"--json": tmp_path / "new.json", "--out": tmp_path / "old.json", "--plot": None})
    check_folder("--plot", tmp_path)
    check_folder("--plot", tmp_path / "a" / "b")
    assert [each.name for each in tmp_path.iterdir()] == ["old.json"]


def test_the_flag_and_the_reason_are_named(tmp_path):
    file = tmp_path / "file"
    file.touch()
    for path, words in ((tmp_path / "no" / "x", "there is no folder"), (file / "x", "no folder"), (tmp_path, "folder")):
        with pytest.raises(ConfigError, match=f"--json {path} cannot be written: .*{words}"):
            check_files({"--json": path})
    for path in (file, file / "x"):
        with pytest.raises(ConfigError, match=f"--plot {path} cannot be written: {file} is no folder"):
            check_folder("--plot", path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_what_may_not_be_written_is_refused(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    with pytest.raises(ConfigError, match="permission denied"):
        check_files({"--json": closed / "x"})
    with pytest.raises(ConfigError, match="permission denied"):
        check_folder("--plot", closed / "x")
