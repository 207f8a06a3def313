"""The files of a calibrated server: its cost table, and a TOML file that describes its engine."""

from __future__ import annotations

from pathlib import Path

import msgspec

from moestro.calibrate.probing.findings import ServerFindings
from moestro.config.run_record import RunRecord
from moestro.cost.tables import Table
from moestro.errors import ConfigError


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
