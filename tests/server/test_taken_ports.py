"""A port that another program has is found before anything is loaded, and the error names its flag."""

from __future__ import annotations

import socket

import pytest

from moestro.cli import main

PACED = ("--model", "qwen3-30b-a3b", "--device", "paced:h20", "--paced-arithmetic", "none")


@pytest.mark.parametrize(
    ("command", "flag", "named"),
    [
        (("serve", *PACED), "--port", "give another --host or --port"),
        (("serve", *PACED, "--port", "0"), "--admin-port", "give another --admin-port"),
        (("route", "--engine", "http://a:1", "--admin-port", "0"), "--port", "give another --host or --port"),
        (
            ("route", "--engine", "http://a:1", "--port", "0"),
            "--admin-port",
            "give another --admin-host or --admin-port",
        ),
    ],
)
def test_the_error_names_the_flag_of_the_port_that_is_taken(command, flag, named, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as ended:
            main([*command, flag, str(port)])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{port} " in error
    assert error.endswith(f": {named}\n")
