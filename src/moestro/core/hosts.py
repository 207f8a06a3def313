"""Hosts in addresses with a port, and the networks that they belong to."""

from __future__ import annotations

import ipaddress
from functools import lru_cache

_IPV6_PREFIX = 64  # prefix of the smallest network of one customer, who can use all of its addresses


def in_address(host: str) -> str:
    """Return a host as it stands before a port: an IPv6 address in brackets, anything else unchanged."""
    return f"[{host}]" if ":" in host else host


@lru_cache(maxsize=4096)
def network_of(address: str) -> str:
    """Return the name under which an address counts: an IPv4 address, or the /64 network of an IPv6 address."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address  # of a Unix socket
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, _IPV6_PREFIX), strict=False))
