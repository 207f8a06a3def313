"""What a result says of the code that made it."""

from __future__ import annotations

import subprocess

import msgspec

from moestro.config.run_record import commit_of, run_record, shown_command, without_user


def git(directory, *words):
    who = ("-c", "user.name=N", "-c", "user.email=n@example.org")
    done = subprocess.run(["git", *who, *words], cwd=directory, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_the_commit_is_the_last_that_changed_the_package(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    assert commit_of(package) == ""  # no checkout
    git(tmp_path, "init", "-q")
    (tmp_path / "page.md").write_text("one")
    git(tmp_path, "add", "page.md")
    git(tmp_path, "commit", "-q", "-m", "a page")
    (package / "code.py").write_text("one = 1")
    assert commit_of(package) == ""  # the checkout of something else
    git(tmp_path, "add", "package")
    git(tmp_path, "commit", "-q", "-m", "the package")
    commit = git(tmp_path, "rev-parse", "--short=12", "HEAD")
    (tmp_path / "page.md").write_text("two")
    git(tmp_path, "commit", "-q", "-a", "-m", "the page again")
    assert commit_of(package) == commit
    (package / "code.py").write_text("one = 2")
    assert commit_of(package) == f"{commit}-dirty"


def test_the_code_is_known_to_be_the_same_only_where_nothing_was_changed_after_a_commit():
    run = run_record("simulated")
    of = {commit: msgspec.structs.replace(run, commit=commit) for commit in ("", "0123", "0123-dirty", "4567")}
    alike = {(a, b) for a in of for b in of if of[a].has_code_of(of[b])}
    assert alike == {("0123", "0123"), ("4567", "4567")}


def test_a_command_has_no_path_of_the_program(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/moestro", "repro", "lmetric", "--out", "my results"])
    assert run_record("simulated").command == "moestro repro lmetric --out 'my results'"


def test_a_script_is_shown_with_its_path_in_the_checkout_and_a_key_is_hidden(monkeypatch):
    monkeypatch.setattr("sys.argv", ["bench/serving/kill.py", "--api-key", "sesame", "--api-key=sesame", "--rounds=1"])
    assert run_record("measured").command == "python bench/serving/kill.py --api-key *** --api-key=*** --rounds=1"


def test_user_and_password_of_a_url_are_hidden():
    command = ["moestro", "calibrate", "--server", "http://ann:s3@host:8000/v1", "--out=a@b/c.json"]
    assert shown_command(command) == "moestro calibrate --server 'http://***@host:8000/v1' --out=a@b/c.json"
    assert without_user("https://host/path@1") == "https://host/path@1"


def test_the_record_names_the_loaded_libraries_and_the_machine():
    record = run_record("measured", note="on battery")
    assert record.libraries["msgspec"]
    assert record.machine
    assert record.num_cpus > 0
    assert (record.kind, record.note) == ("measured", "on battery")
