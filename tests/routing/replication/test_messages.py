"""Messages between routers are typed and bounded."""

from __future__ import annotations

import msgspec
import pytest
from support.routers import request, router

from moestro.routing.replication.journal import (
    MAX_BLOCKS,
    MAX_MESSAGE_BYTES,
    MAX_OPERATIONS,
    Began,
    Digest,
    Finished,
    Journal,
    OperationBatch,
    Outlet,
    RouterRun,
    Want,
    decode_message,
    encode_message,
)

ORIGIN = RouterRun("r", 1)


def batch(*operations) -> OperationBatch:
    return OperationBatch(ORIGIN, 1, 0, len(operations), Digest(0, 0), list(operations))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "cannot be read"),
        (b"\x80", "cannot be read"),
        (bytes(MAX_MESSAGE_BYTES + 1), "may have 1048576"),
        (msgspec.msgpack.encode([1, ["r", 1], 1, 0, 1, [0, 0], [[9, 1]]]), "cannot be read"),
        (encode_message(batch(Finished(-1))), "cannot be read"),
        (encode_message(batch(Began(0, "e", 0, -5, 1))), "cannot be read"),
        (encode_message(batch(Began(0, "", 0, 1, 1))), "cannot be read"),
        (encode_message(batch(Began(0, "e", 0, 1, 1, b"short"))), "whole number of blocks"),
        (encode_message(batch(Began(0, "e", 0, 1, 1, bytes(16 * MAX_BLOCKS + 16)))), "cannot be read"),
        (encode_message(batch(Began(0, "e", 0, 1, 1, b"", "x" * 257))), "cannot be read"),
        (encode_message(batch(*[Finished(1)] * (MAX_OPERATIONS + 1))), "cannot be read"),
        (encode_message(OperationBatch(RouterRun("", 1), 1, 0, 1, Digest(0, 0))), "cannot be read"),
    ],
)
def test_what_no_router_sends_is_refused(data, words):
    with pytest.raises(ValueError, match=words):
        decode_message(data)


def test_a_message_is_read_as_it_was_sent():
    message = batch(Began(7, "http://e:1", -5, 9, 4, bytes(32), "session", None), Finished(7))
    assert decode_message(encode_message(message)) == message


@pytest.mark.parametrize("name", ["x" * 256, "\u00e9" * 256, "\U0001f600" * 256])
def test_requests_with_long_names_are_sent_in_messages_that_routers_read(name):
    """A message that is too long ends the connection, and the next one begins with the same operations."""
    sender = router(1, "least_loaded")
    sender.journal = Journal(ORIGIN, lambda row: "http://10.0.0.1:8000")
    outlet = Outlet(sender.journal, beat_ns=1)
    hashes = bytes(16 * MAX_BLOCKS)
    for number in range(MAX_OPERATIONS):
        names = {"session_id": name, "user": name, "block_hashes": hashes if number > 500 else b""}
        sender.submit(request(f"{number}", MAX_BLOCKS, **names), 0)
    for wanted in (1, None):
        outlet.wanted(Want(ORIGIN, wanted))
        message = outlet.next_due(0)
        assert decode_message(encode_message(message)) == message
        sent = message.operations[0] if wanted else message.flights[0]
        assert sent.session_id == sent.user == (name if name.isascii() else None)
