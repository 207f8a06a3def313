"""Each verb that talks to a server takes its address as --url and as --base-url."""

from __future__ import annotations

import pytest

from moestro.cli import main


@pytest.mark.parametrize("verb", ["bench", "run-batch", "chat", "calibrate"])
@pytest.mark.parametrize("flag", ["--url", "--base-url"])
def test_the_address_of_a_server_has_both_names(verb, flag, tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text("")
    files = ("-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")) if verb == "run-batch" else ()
    with pytest.raises(SystemExit) as ended:
        main([verb, *files, flag, "127.0.0.1:9"])
    assert ended.value.code == 2
    assert "must begin with http:// or https://, got 127.0.0.1:9" in capsys.readouterr().err
