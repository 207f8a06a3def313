"""A stranger at the KV publisher's ports cannot make the engine hold a large frame."""

from __future__ import annotations

import socket
import struct
import time

import pytest
from support.kv_listener import free_ports

from moestro.config.kv_events_settings import KvEventsSettings
from moestro.worker.kv_events.publisher import KvPublisher


class NoEvents:
    def take(self):
        return []


@pytest.mark.parametrize(("at", "kind"), [(0, b"SUB"), (1, b"DEALER")])
def test_a_frame_of_3_gb_ends_the_connection(at, kind):
    ports = free_ports(2)
    events, replay = (f"tcp://127.0.0.1:{port}" for port in ports)
    settings = KvEventsSettings(enable_kv_cache_events=True, endpoint=events, replay_endpoint=replay)
    publisher = KvPublisher(settings, 0, NoEvents(), 16)
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
    try:
        with socket.create_connection(("127.0.0.1", ports[at]), timeout=5) as stranger:
            stranger.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48) + bytes([4, len(ready)]) + ready)
            time.sleep(0.3)
            with pytest.raises(ConnectionError):
                stranger.sendall(b"\x02" + struct.pack(">Q", 3 << 30) + bytes(100 << 20))
    finally:
        publisher.close()
