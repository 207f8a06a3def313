"""Links: one message's price, and which link joins two workers."""

import pytest

from moestro.core.stages import HOP_RECORD
from moestro.cost.links import (
    EFA_P4D,
    INFINIBAND_HDR,
    LINKS,
    NVSWITCH_A100,
    Link,
    Machines,
    hop_bytes,
    link_named,
    two_phase,
)
from moestro.cost.networks import network_named
from moestro.errors import ConfigError


def test_a_message_takes_its_start_its_bytes_and_the_latency():
    link = Link(name="plain", message_ns=1_000, latency_ns=5_000, bytes_per_s=1e9)
    assert link.sending_ns(0) == 1_000
    assert link.sending_ns(2_000) == 3_000
    assert link.transfer_ns(2_000) == 8_000


def test_a_larger_message_is_never_faster_on_any_link():
    for link in LINKS.values():
        prices = [link.transfer_ns(num_bytes) for num_bytes in (0, 1, 4096, 1 << 20, 1 << 26)]
        assert prices == sorted(prices)


def test_small_messages_between_two_a100_take_what_nccl_was_measured_to_take():
    assert NVSWITCH_A100.transfer_ns(8_192) == pytest.approx(10_500, rel=0.2)
    assert NVSWITCH_A100.transfer_ns(67 << 20) == pytest.approx(446_000, rel=0.1)


def test_an_announcement_delays_a_message_and_does_not_keep_the_link_busy():
    link = two_phase(INFINIBAND_HDR, 50_000)
    assert link.sending_ns(1 << 20) == INFINIBAND_HDR.sending_ns(1 << 20)
    assert link.transfer_ns(1 << 20) == INFINIBAND_HDR.transfer_ns(1 << 20) + 50_000


def test_workers_of_one_machine_are_joined_by_its_own_link():
    machines = Machines(machine_of=(0, 0, 1), within=NVSWITCH_A100, across=EFA_P4D)
    assert machines.link(0, 1) is NVSWITCH_A100
    assert machines.link(2, 0) is machines.link(1, 2) is EFA_P4D


def test_a_message_holds_a_hidden_state_a_row_and_a_record_a_choice():
    network = network_named("mixtral-8x7b-mqa")
    assert hop_bytes(network, 10, 17) == 10 * 4096 * 2 + 17 * HOP_RECORD.itemsize


def test_an_unknown_link_is_refused_with_the_known_ones():
    assert link_named("EFA-P4D") is EFA_P4D
    with pytest.raises(ConfigError, match="nvswitch-a100"):
        link_named("carrier-pigeon")
