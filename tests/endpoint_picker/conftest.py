"""The tests of pickers need the libraries of the extra `envoy`, and those of a client of gRPC."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("grpc_health") and find_spec("hpack") else ["test_*.py"]
