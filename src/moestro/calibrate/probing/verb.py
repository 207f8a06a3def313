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
from moestro.calibrate.probing.written import described_engine, with_findings, write_text
from moestro.calibrate.settings import Measuring, ServerProbing
from moestro.config.run_record import run_record
from moestro.loadgen.client import BenchClient, Endpoint
from moestro.loadgen.settings import EndpointSettings


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
