"""Keys by which drawn routing recognises a token: the same in any engine, slot, batch and mode.

A token key holds the source domain, the request and the position of a token. A request key is the token key of
position 0, so a token's key is its request's key plus its position.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from moestro.core.unit_sets import token_spans

Keys = NDArray[np.uint64]

_POSITION_BITS, _REQUEST_BITS, _DOMAIN_BITS = 24, 32, 8
MAX_DOMAINS = 1 << _DOMAIN_BITS


def request_key(number: int, domain: int = 0) -> int:
    """Make the key of a request from its number in the workload.

    Args:
        number: row of a trace, at least 0; numbers that differ by a multiple of 2**32 get the same key.
        domain: source domain of the request, below `MAX_DOMAINS`.
    """
    assert 0 <= domain < MAX_DOMAINS, f"domain {domain} is not in 0 .. {MAX_DOMAINS - 1}"
    return ((domain << _REQUEST_BITS) + (number & ((1 << _REQUEST_BITS) - 1))) << _POSITION_BITS


def request_keys(numbers: NDArray[np.int64]) -> Keys:
    """uint64[n], `request_key` of each of `numbers`, all from domain 0."""
    keys: Keys = (numbers & ((1 << _REQUEST_BITS) - 1)).astype(np.uint64) << np.uint64(_POSITION_BITS)
    return keys


def named_request_key(request_id: str, domain: int = 0) -> int:
    """Make the key of a request that has no number in a workload, from its id.

    Two of n requests get the same key with a chance of n**2 / 2**33. They then visit the same experts.
    """
    digest = blake2b(request_id.encode(), digest_size=_REQUEST_BITS // 8).digest()
    return request_key(int.from_bytes(digest, "little"), domain)


def token_keys(request_keys: Keys, start: NDArray[np.int32], num_tokens: NDArray[np.int32]) -> Keys:
    """uint64[sum of num_tokens], the key of each token of n units in order.

    Args:
        request_keys: uint64[n], request of each unit.
        start: int[n], position of each unit's first token.
        num_tokens: int[n], tokens of each unit, at least 1.
    """
    if int(num_tokens.sum()) == len(start):  # all decode: one addition
        keys: Keys = request_keys + start.astype(np.uint64)
        return keys
    spread: Keys = np.repeat(request_keys, num_tokens) + token_spans(start, num_tokens).astype(np.uint64)
    return spread


def domains_of(keys: Keys) -> NDArray[np.int64]:
    """int64[n], source domain of each token."""
    domains: NDArray[np.int64] = (keys >> np.uint64(_REQUEST_BITS + _POSITION_BITS)).astype(np.int64)
    return domains


def requests_of(keys: Keys) -> Keys:
    """uint64[n], key of each token's request without its position."""
    requests: Keys = keys >> np.uint64(_POSITION_BITS)
    return requests


def positions_of(keys: Keys) -> NDArray[np.int64]:
    """int64[n], position of each token in its request."""
    positions: NDArray[np.int64] = (keys & np.uint64((1 << _POSITION_BITS) - 1)).astype(np.int64)
    return positions
