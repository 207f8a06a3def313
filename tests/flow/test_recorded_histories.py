"""The flow over many devices does on one device what the flow of one device did: the same tokens, the same items.

`recorded_histories.json.gz` was written by the core before it learnt of other devices, at commit ab6235f. Items without
expert batches, which ended a layer of units, are left out of the comparison: the next attention ends it now.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from support.flow_histories import POLICIES, run_history

RECORDED = json.loads(gzip.decompress(Path(__file__).with_name("recorded_histories.json.gz").read_bytes()))


def test_histories_of_all_policies_are_recorded():
    assert {name.split("|")[0] for name in RECORDED} == set(POLICIES)
    assert sum(len(history["launched"]) for history in RECORDED.values()) > 30_000


@pytest.mark.parametrize("name", RECORDED)
def test_one_device_launches_what_it_launched(name):
    policy, seed, passes_decodes, num_chosen = name.split("|")
    history = run_history(int(seed), policy, passes_decodes=passes_decodes == "1", num_chosen=int(num_chosen))
    assert history["tokens"] == RECORDED[name]["tokens"]
    assert history["launched"] == RECORDED[name]["launched"]
