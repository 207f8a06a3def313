"""Hosts in addresses with a port."""

from __future__ import annotations


def in_address(host: str) -> str:
    """Return a host as it stands before a port: an IPv6 address in brackets, anything else unchanged."""
    return f"[{host}]" if ":" in host else host
