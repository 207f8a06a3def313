"""Settings of the endpoint picker that cannot be used are refused at the start, with what to do."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest
from support.running import MOESTRO, run_command

from moestro.errors import ConfigError
from moestro.gateway.part_settings import PickerSettings
from moestro.gateway.settings import EngineSettings, EngineUrl, RouteSettings

ENGINE = EngineSettings(engine=("http://127.0.0.1:1",))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ext_proc": 70_000}, "70000"),
        ({"ext_proc": -1}, "-1"),
        ({"ext_proc_ssl_keyfile": Path("a")}, "--ext-proc-ssl-keyfile is for TLS: give --ext-proc-ssl-certfile"),
        ({"ext_proc_ssl_ca_certs": Path("a")}, "--ext-proc-ssl-ca-certs is for TLS: give --ext-proc-ssl-certfile"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        PickerSettings(**given)


def test_an_engine_below_a_path_is_no_endpoint():
    engines = EngineSettings(engine=("a=http://127.0.0.1:1/api/v1",))
    with pytest.raises(ConfigError, match=r"a=http://127.0.0.1:1/api: --ext-proc names engines by address and port"):
        RouteSettings(engines=engines, picker=PickerSettings(ext_proc=0))
    RouteSettings(engines=engines)  # without a picker it may be
    EngineUrl.parse("http://127.0.0.1:1/v1").check_is_endpoint()  # the usual base URL


def start(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [MOESTRO, "route", "--engine", "http://127.0.0.1:1", "--port", "0", "--admin-port", "0", *flags]
    return run_command(command)


def test_a_port_in_use_and_unreadable_certificates_end_the_start(tmp_path):
    pytest.importorskip("hpack")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = start("--ext-proc", str(taken.getsockname()[1]))
    assert done.returncode == 2
    assert "--ext-proc: cannot listen on 127.0.0.1:" in done.stderr
    missing, text = tmp_path / "missing.pem", tmp_path / "text.pem"
    text.write_text("no certificate")
    for key, words in ((missing, "cannot be read: No such file"), (text, "is not in PEM format")):
        done = start("--ext-proc", "0", "--ext-proc-ssl-certfile", str(text), "--ext-proc-ssl-keyfile", str(key))
        assert done.returncode == 2
        assert f"{key} {words}" in done.stderr
