"""examples/own_gateway.py: the router as a library."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_gateway.py"


def test_requests_spread_and_meet_their_prefixes():
    spec = importlib.util.spec_from_file_location("own_gateway", EXAMPLE)
    gateway = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gateway)
    documents = [f"document {number}: " + str(number) * 4_000 for number in range(8)]
    first, engines = {}, Counter()
    for document in documents:
        name, first[document] = gateway.choose(document)
        engines[first[document]] += 1
        gateway.first_token(name)
    assert set(engines.values()) == {4}
    for document in documents:
        name, engine = gateway.choose(document + "a question")
        assert engine == first[document]
        gateway.first_token(name)
        gateway.ended(name, 20)
    assert gateway.router.num_in_flight == len(documents)
