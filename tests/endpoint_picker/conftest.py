"""The tests of pickers need the libraries of the extra `envoy`."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("grpc_health") else ["test_*.py"]
