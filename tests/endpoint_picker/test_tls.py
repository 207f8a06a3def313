"""TLS on the picker's port: certificates, their renewal, and proxies that must have one."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path

import grpc
import pytest
from endpoint_picker.envoys import running_envoy
from endpoint_picker.pickers import OTHER, SERVICE, Picker, health_of, running_picker, with_processes
from gateway.rig import FakeEngine
from support.running import envoy_binary

pytestmark = [
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates"),
    pytest.mark.skipif(OTHER is not None, reason="each picker has its own flags for TLS"),
]


def make_authority(directory: Path, name: str) -> Path:
    """A certificate that signs others; its key is beside it."""
    made = directory / f"{name}.pem"
    run(
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"),
        *("-subj", f"/CN={name}", "-keyout", str(directory / f"{name}.key"), "-out", str(made)),
    )
    return made


def make_certificate(directory: Path, authority: str, name: str) -> tuple[Path, Path]:
    """A certificate for localhost and its key."""
    key, request, made = (directory / f"{name}{suffix}" for suffix in (".key", ".csr", ".pem"))
    extension = directory / "extension"
    extension.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    run(
        *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}"),
        *("-keyout", str(key), "-out", str(request)),
    )
    run(
        *("x509", "-req", "-in", str(request), "-days", "2", "-out", str(made), "-extfile", str(extension)),
        *("-CA", str(directory / f"{authority}.pem"), "-CAkey", str(directory / f"{authority}.key"), "-CAcreateserial"),
    )
    return made, key


def run(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def credentials(authority: Path, own: tuple[Path, Path] | None) -> grpc.ChannelCredentials:
    chain, key = (own[0].read_bytes(), own[1].read_bytes()) if own else (None, None)
    return grpc.ssl_channel_credentials(authority.read_bytes(), key, chain)


async def secure_health(picker: Picker, authority: Path, own: tuple[Path, Path] | None = None) -> str:
    """The picker's readiness over TLS, or `refused`."""
    # A channel of its own: gRPC would share the connection of an earlier one.
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(
        f"localhost:{picker.port}", credentials(authority, own), options=options
    ) as channel:
        try:
            return await asyncio.wait_for(health_of(channel, SERVICE), 60)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return "refused"


async def until_secure(picker: Picker, authority: Path, status: str, own: tuple[Path, Path] | None = None) -> None:
    for _ in range(600):
        if (found := await secure_health(picker, authority, own)) == status:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{found}, not {status}:\n{picker.text}")


@with_processes
async def test_tls_with_renewal_and_envoy_over_it(tmp_path):
    authority = make_authority(tmp_path, "authority")
    stranger = make_authority(tmp_path, "stranger")
    chain, key = make_certificate(tmp_path, "authority", "picker")
    engines = [FakeEngine("a"), FakeEngine("b")]
    for engine in engines:
        await engine.start()
    ports = [engine.port for engine in engines]
    flags = ("--ext-proc-ssl-certfile", str(chain), "--ext-proc-ssl-keyfile", str(key))

    def edit(text: str) -> str:
        socket = (
            "transport_socket: {name: tls, typed_config: {'@type': type.googleapis.com/envoy.extensions."
            "transport_sockets.tls.v3.UpstreamTlsContext, sni: localhost, common_tls_context: {validation_context:"
            f" {{trusted_ca: {{filename: {authority}}}}}}}}}}}"
        )
        return text.replace(
            "  - name: picker\n    type: STATIC\n", f"  - name: picker\n    {socket}\n    type: STATIC\n"
        )

    try:
        async with running_picker(ports, tmp_path, *flags) as picker:
            await until_secure(picker, authority, "SERVING")
            assert await secure_health(picker, stranger) == "refused"
            if envoy_binary() is not None:
                async with running_envoy(tmp_path, picker.port, ports, edit) as envoy:
                    for _ in range(500):
                        if (answer := await envoy.call()).status == 200:
                            break
                        await asyncio.sleep(0.02)
                    assert answer.status == 200
            new_chain, new_key = make_certificate(tmp_path, "stranger", "renewed")
            new_key.replace(key)
            new_chain.replace(chain)
            await until_secure(picker, stranger, "SERVING")
            assert await secure_health(picker, authority) == "refused"
            chain.write_text("half a file")  # as while it is being replaced: the last certificate stays in use
            assert await secure_health(picker, stranger) == "SERVING"
    finally:
        for engine in engines:
            engine.die()


@with_processes
async def test_a_proxy_needs_a_certificate_of_the_given_authorities(tmp_path):
    authority = make_authority(tmp_path, "authority")
    make_authority(tmp_path, "stranger")
    chain, key = make_certificate(tmp_path, "authority", "picker")
    proxy, foreign = make_certificate(tmp_path, "authority", "proxy"), make_certificate(tmp_path, "stranger", "foreign")
    engine = FakeEngine("a")
    await engine.start()
    flags = ("--ext-proc-ssl-certfile", str(chain), "--ext-proc-ssl-keyfile", str(key))
    try:
        async with running_picker([engine.port], tmp_path, *flags, "--ext-proc-ssl-ca-certs", str(authority)) as picker:
            await until_secure(picker, authority, "SERVING", proxy)
            assert await secure_health(picker, authority) == "refused"
            assert await secure_health(picker, authority, foreign) == "refused"
    finally:
        engine.die()
