"""`moestro calibrate --server`: probes a running server, writes its cost table and its description, and prints both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import uvloop
from rich.console import Console

from moestro.calibrate.probing.beside import BesideDesign
from moestro.calibrate.probing.client import ProbingClient
from moestro.calibrate.probing.design import IdleDesign
from moestro.calibrate.probing.findings import ServerFindings, find
from moestro.calibrate.probing.probes import ProbedServer, ProbeLimits
from moestro.calibrate.settings import Measuring, ServerProbing
from moestro.config.run_record import RunRecord, run_record
from moestro.cost.tables import Table
from moestro.errors import ConfigError
from moestro.loadgen.client import BenchClient, Endpoint
from moestro.loadgen.settings import EndpointSettings


def described_engine(found: ServerFindings, table: Path, url: str) -> str:
    """Return the table [engines] of a simulation, each number with its source.

    Args:
        table: file of the cost table, beside this file.
        url: address of the server.
    """
    lines = [
        f"# The engine at {url}, as moestro calibrate probed it. moestro sim FILE and --engines FILE read this table.",
        "[engines]",
        f"table = {msgspec.json.encode(table.name).decode()}",
        *(f"{name} = {size.value}  # {size.source}" for name, size in found.sizes.items()),
    ]
    if found.caches_prefixes is not None:
        lines.append(f"enable_prefix_caching = {str(found.caches_prefixes).lower()}  # probed")
    lines += [
        f"api_us = {found.api_us:.1f}  # time of a request outside the engine",
        f"api_token_us = {found.api_token_us:.3f}  # and for each token of its prompt",
    ]
    return "\n".join(lines) + "\n"


def with_findings(found: ServerFindings, conditions: RunRecord, url: str) -> Table:
    """Return the cost table with everything that is known of how it came about."""
    about = {
        **msgspec.to_builtins(conditions),
        "server": url,
        "estimates": msgspec.to_builtins(found.estimates),
        "errors_on_other_sizes": list(found.errors),
        "notes": list(found.notes),
    }
    return msgspec.structs.replace(found.table, about=about)


def write_text(flag: str, path: Path, text: str) -> None:
    """Write a file.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be written: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class CalibratedServer:
    """Result: what was found, and the files that hold it."""

    found: ServerFindings
    table: Path
    engines: Path


def calibrate_server(settings: ServerProbing, measuring: Measuring, console: Console) -> CalibratedServer:
    """Probe the server, write `--out` and the description beside it, and print what was found.

    Raises:
        ConfigError: no server answers there, or a file cannot be written.
        MoestroError: the server is busy, refuses or fails probes, is too slow, or contradicts itself. No file is
            written.
    """
    assert settings.server is not None, "the verb checks it"
    endpoint_settings = EndpointSettings(
        base_url=settings.server, model=settings.served_model, api_key=settings.api_key, timeout=settings.seconds
    )
    conditions = run_record("measured")
    with console.status("calibrating the server") as status:

        def on_probe(kind: str, elapsed_s: float) -> None:
            status.update(f"calibrating the server: {elapsed_s:.0f} of {settings.seconds:.0f} s, {kind}")

        found, endpoint = uvloop.run(_probe(endpoint_settings, settings, measuring.seed, on_probe))
    if endpoint.is_paced:
        conditions = msgspec.structs.replace(conditions, kind="paced")
    engines = measuring.out.with_suffix(".toml")
    table = with_findings(found, conditions, endpoint_settings.root)
    write_text("--out", measuring.out, msgspec.json.format(msgspec.json.encode(table), indent=1).decode() + "\n")
    write_text("--out", engines, described_engine(found, measuring.out, endpoint_settings.root))
    _print(console, found)
    console.print(f"Written to {measuring.out} and {engines}.", markup=False, highlight=False, soft_wrap=True)
    return CalibratedServer(found, measuring.out, engines)


async def _probe(
    endpoint_settings: EndpointSettings, settings: ServerProbing, seed: int, on_probe: Callable[[str, float], None]
) -> tuple[ServerFindings, Endpoint]:
    limits = ProbeLimits(
        seconds=settings.seconds,
        max_concurrency=settings.max_concurrency,
        max_prompt_tokens=settings.max_prompt_tokens,
        max_added_load=settings.max_added_load,
    )
    async with BenchClient(endpoint_settings) as client:
        endpoint = await client.find_endpoint()
        probing = ProbingClient(client, endpoint, limits, vocab_size=settings.vocab_size, seed=seed)
        server = await probing.find_server()
        design = make_design(server, limits, seed)
        await probing.drive(design.run(), on_probe)
    return find(design.observed, server), endpoint


def make_design(server: ProbedServer, limits: ProbeLimits, seed: int) -> IdleDesign | BesideDesign:
    """Choose the experiment: for an idle server, or beside traffic."""
    return IdleDesign(server, limits, seed) if limits.max_added_load is None else BesideDesign(server, limits, seed)


def _print(console: Console, found: ServerFindings) -> None:
    rows = [(each.title, each.words) for each in found.estimates]
    cached = {True: "prefixes are cached", False: "no prefix is cached", None: "not identified"}
    rows.append(("prefix cache", cached[found.caches_prefixes]))
    if found.errors:
        sizes = np.abs(found.errors)
        rows.append(
            (
                "other sizes",
                f"{len(sizes)} probes priced with a mean error of {sizes.mean():.1%}, {sizes.max():.1%} at most",
            )
        )
    for name, text in rows:
        console.print(f"{name:<32} {text}", markup=False, highlight=False, soft_wrap=True)
    for note in found.notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
