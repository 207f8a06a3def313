"""Keys of the sockets between machines."""

from __future__ import annotations

import msgspec


class CurveKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Two key pairs of CURVE in Z85, which all processes of one server share; a process that has them is admitted.

    A socket that listens proves the pair `server`, and one that connects proves the pair `client`.
    """

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes

    def __repr__(self) -> str:
        """Return a text without the keys, which logs and tracebacks must not contain."""
        return "CurveKeys(…)"
