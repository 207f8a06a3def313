"""Text files are read as editors and shells of any system write them."""

from __future__ import annotations

import io

import pytest
from support.text_files import WRITERS

from moestro.files.text_files import decoded, open_utf8, read_text, text_of

TEXT = 'a: "é"\n\nb\n'


@pytest.mark.parametrize("write", WRITERS)
def test_text_is_the_same_however_it_was_written(write, tmp_path):
    raw = write(TEXT)
    path = tmp_path / "t"
    path.write_bytes(raw)
    assert text_of(raw) == TEXT
    assert read_text(path) == TEXT
    assert list(decoded(io.BytesIO(raw))) == TEXT.splitlines(keepends=True)
    with open_utf8(path) as lines:
        assert [line.rstrip(b"\r\n").decode() for line in lines] == TEXT.splitlines()


@pytest.mark.parametrize("raw", [b"", b"\n", b"\xef\xbb\xbf", b"a"])
def test_short_files_are_texts(raw, tmp_path):
    (tmp_path / "t").write_bytes(raw)
    assert text_of(raw) == raw.decode("utf-8-sig")
    with open_utf8(tmp_path / "t") as lines:
        assert lines.read().decode() == text_of(raw)


def test_bytes_that_are_no_text_are_an_error():
    with pytest.raises(UnicodeDecodeError):
        text_of(b"a\xff")
