"""Dilation, lateness and modelled links of paced devices; then the real command."""

from __future__ import annotations

import heapq
import time
from dataclasses import replace

import numpy as np
import pytest
from support.fake_device import make_request
from support.running import REAL, Running, call, complete, is_idle, metrics, wait_until

from moestro.core.load_figures import LoadFigures, PaceCounts
from moestro.core.processes import WorkerKind
from moestro.core.stages import DISPATCH, HOP_RECORD, Hop, HopMessage
from moestro.core.work import Forward
from moestro.cost.gpus import H20
from moestro.cost.links import HOP_HEADER_BYTES, NVSWITCH_A100, Machines, hop_bytes, two_phase
from moestro.cost.model import Batch
from moestro.cost.networks import network_named
from moestro.cost.priced_device import PricedStages, whole_setup
from moestro.cost.roofline import Roofline, RooflineSettings
from moestro.cost.settings import PacedSettings
from moestro.engine.rank import Rank, build_preemptive_rank, build_rank
from moestro.engine.settings import SchedulerSettings
from moestro.errors import ConfigError
from moestro.flow.policies.qllm import ExpertLevelPreemption
from moestro.server.experts.coordinator import WorkerView
from moestro.server.figures.prometheus import group_metrics
from moestro.server.figures.statistics import PaceLines
from moestro.sim.groups.worker_group import Transfer, VirtualLinks
from moestro.wire.messages import Add, Outputs, Shutdown, WorkerFigures
from moestro.worker.paced import FixedAnswers, PacedDevice, dilated, pace_of_stages
from moestro.worker.paced_group import OpenedStep, PacedGroupDevice, PricedStep
from moestro.worker.peer_links import LinkPace, StampFrames
from moestro.worker.rank_loop import SideJobs, run_rank

NETWORK = network_named("qwen3-30b-a3b")
COST = Roofline(RooflineSettings(network=NETWORK, gpu=H20))
BOUNDS = SchedulerSettings(num_blocks=64, block_size=4, max_model_len=64)
LINK = two_phase(NVSWITCH_A100)


def paced(dilation: float) -> PacedSettings:
    return PacedSettings(device="paced:h20", paced_arithmetic="none", pace_dilation=dilation)


def staged(dilation: float) -> PricedStages:
    answers = FixedAnswers([7])
    setup = dilated(whole_setup(COST, 128, 16), paced(dilation))
    return PricedStages(COST, setup, lambda units, now_ns: answers.of(Forward(units), now_ns))


def fused_rank(dilation: float) -> Rank:
    return build_rank(BOUNDS, PacedDevice(COST, FixedAnswers([7]), dilation))


def preemptive_rank(dilation: float) -> Rank:
    bounds = replace(BOUNDS, max_num_batched_tokens=128, max_num_urgent_seqs=8)
    return build_preemptive_rank(bounds, staged(dilation), ExpertLevelPreemption(max_wait_ns=None, max_merged=0))


def token_times(rank: Rank, late_ns: int = 0) -> list[int]:
    """Times of the tokens of one request, on a clock that goes to `late_ns` after each end."""
    now_ns, found = 0, []
    rank.add(make_request("r", range(5), max_tokens=5), now_ns)
    while rank.has_work:
        found += [now_ns for output in rank.step(now_ns) for _ in output.token_ids]
        ready_ns = rank.ready_at_ns()
        now_ns = now_ns if ready_ns is None else max(now_ns, ready_ns + late_ns)
    return found


@pytest.mark.parametrize("make", [fused_rank, preemptive_rank])
def test_dilation_multiplies_all_modelled_times(make):
    plain = np.array(token_times(make(1)))
    assert token_times(make(2)) == pytest.approx(2 * plain, abs=400)  # pieces are rounded one by one
    assert token_times(make(3.5)) == pytest.approx(3.5 * plain, abs=400)


@pytest.mark.parametrize("dilation", [1, 2])
def test_lateness_is_counted_undilated_beside_the_dilated_durations_of_items(dilation):
    device = PacedDevice(COST, FixedAnswers([7]), dilation)
    assert len(token_times(build_rank(BOUNDS, device), late_ns=300)) == 5
    prices = [COST.step_ns(Batch(np.array([0]), np.array([5])))]
    prices += [COST.step_ns(Batch(np.array([start]), np.array([1]))) for start in (5, 6, 7, 8)]
    assert device.pace_counts() == PaceCounts(
        dilation=dilation, num_items=5, item_ns=dilation * sum(prices), late_ns=5 * 300
    )


def test_a_device_in_stages_counts_lateness_too():
    stages = staged(2)
    bounds = replace(BOUNDS, max_num_batched_tokens=128, max_num_urgent_seqs=8)
    policy = ExpertLevelPreemption(max_wait_ns=None, max_merged=0)
    ends = token_times(build_preemptive_rank(bounds, stages, policy), late_ns=300)
    counts = pace_of_stages(stages, paced(2))
    assert counts.dilation == 2
    assert counts.late_ns == 300 * counts.num_items > 0
    assert counts.item_ns + counts.late_ns == ends[-1]


class OneStepGroup:
    """A group whose step ended 2 ms ago."""

    def open(self, own: OpenedStep) -> PricedStep:
        return PricedStep([0, 5], time.monotonic_ns() - 2_000_000, 1_000_000, [400_000, 900_000])


def test_an_idle_rank_of_a_group_counts_when_it_woke():
    device = PacedGroupDevice(OneStepGroup(), 0, FixedAnswers([7]), 4)
    device.open_step(None)
    device.take_part(0)
    counts = device.pace_counts()
    assert (counts.dilation, counts.num_items, counts.item_ns, counts.wait_ns) == (4, 1, 1_000_000, 600_000)
    assert counts.late_ns >= 2_000_000


@pytest.mark.parametrize("value", [0.5, 0, float("nan"), float("inf")])
def test_time_cannot_be_compressed(value):
    with pytest.raises(ConfigError, match="pace-dilation"):
        paced(value)


# --- links ------------------------------------------------------------------------------------------------------------


def message(src: int, seq: int, num_rows: int, num_records: int, dst: int = 2) -> HopMessage:
    hop = Hop(kind=DISPATCH, src=src, dst=dst, epoch=0, seq=seq, layer=0, num_rows=num_rows)
    return HopMessage(hop, np.zeros(num_records, HOP_RECORD))


def test_a_message_is_held_for_the_time_of_its_link():
    sender, receiver = LinkPace(LINK, NETWORK, 2), LinkPace(LINK, NETWORK, 2)
    sent = sender.stamp(message(0, 0, 16, 16), 1000)
    took_ns = LINK.transfer_ns(HOP_HEADER_BYTES + hop_bytes(NETWORK, 16, 16))
    due_ns = 1000 + 2 * took_ns
    assert receiver.ready_at_ns() is None
    assert receiver.deliver([sent], 1000) == []
    assert receiver.ready_at_ns() == pytest.approx(due_ns, abs=4)
    due_ns = receiver.ready_at_ns()
    assert receiver.deliver([], due_ns - 1) == []
    [found] = receiver.deliver([], due_ns + 500)
    assert found.hop == sent.hop
    assert found.tensor is None
    assert (receiver.num_messages, receiver.late_ns) == (1, 500)
    assert receiver.ready_at_ns() is None


def simulated_arrivals(sends) -> dict[tuple[int, int], int]:
    """When the simulator's links bring each message, by sender and number."""
    events: list[tuple[int, int, Transfer]] = []
    machines = Machines(machine_of=(0, 0, 0), within=LINK, across=LINK)
    links = VirtualLinks(machines, NETWORK, lambda transfer, at_ns: events.append((at_ns, len(events), transfer)))
    for at_ns, each in sends:
        links.send(each, at_ns)
    heapq.heapify(events)
    return {
        (transfer.message.hop.src, transfer.message.hop.seq): links.receive(transfer, at_ns)
        for at_ns, _, transfer in (heapq.heappop(events) for _ in range(len(events)))
    }


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("dilation", [1, 4])
def test_law_messages_arrive_when_the_simulator_says_and_in_order(seed, dilation):
    rng = np.random.default_rng(seed)
    sends, seqs = [], [0, 0]
    for at_ns in np.sort(rng.integers(0, 400_000, 60)).tolist():
        src, num_rows = int(rng.integers(2)), int(rng.integers(1, 300))
        sends.append((at_ns, message(src, seqs[src], num_rows, num_rows * 2)))
        seqs[src] += 1
    expected = simulated_arrivals(sends)
    senders, receiver = [LinkPace(LINK, NETWORK, dilation) for _ in range(2)], LinkPace(LINK, NETWORK, dilation)
    stamped = [(at_ns * dilation, senders[each.hop.src].stamp(each, at_ns * dilation)) for at_ns, each in sends]
    found: dict[tuple[int, int], int] = {}
    now_ns = 0
    while len(found) < len(sends):
        arrived = [each for at_ns, each in stamped if at_ns <= now_ns]
        stamped = stamped[len(arrived) :]
        for each in receiver.deliver(arrived, now_ns):
            assert (each.hop.src, each.hop.seq - 1) in found or each.hop.seq == 0
            found[each.hop.src, each.hop.seq] = now_ns
        next_ns = (receiver.ready_at_ns(), stamped[0][0] if stamped else None)
        now_ns = min((at_ns for at_ns in next_ns if at_ns is not None), default=now_ns)
    assert found.keys() == expected.keys()
    for key, at_ns in expected.items():
        assert found[key] == pytest.approx(dilation * at_ns, abs=len(sends) * dilation)  # each price is rounded


def test_a_stamp_of_another_size_is_refused():
    frames = StampFrames()
    assert frames.unpack(frames.pack(2**60), 5) == 2**60
    with pytest.raises(ValueError, match="8"):
        frames.unpack(b"", 1)


# --- reports ----------------------------------------------------------------------------------------------------------


class ScriptedInbox:
    """Brings one request, and ends the loop when it has its tokens."""

    num_steps, owes = 0, False

    def __init__(self) -> None:
        self.sent: list[Outputs] = []
        self._messages = [Add(make_request("r", range(5), max_tokens=3))]

    def receive(self, wait_s: float | None) -> list[object]:
        messages, self._messages = self._messages, []
        done = sum(len(output.token_ids) for each in self.sent for output in each.outputs) == 3
        return [*messages, Shutdown()] if done else messages

    def has_messages(self) -> bool:
        return bool(self._messages)

    def send(self, sent: Outputs) -> None:
        self.sent.append(sent)


def test_counts_go_with_outputs_and_cause_no_message_of_their_own():
    reports = []
    for is_paced in (False, True):
        clock, inbox, device = iter(range(0, 10**12, 10**6)), ScriptedInbox(), PacedDevice(COST, FixedAnswers([7]))
        rank = build_rank(BOUNDS, device)
        run_rank(
            rank,
            inbox,
            lambda clock=clock: next(clock),
            SideJobs(pace_counts=device.pace_counts if is_paced else rank.pace_counts),
        )
        reports.append([each.load for each in inbox.sent])
    plain, counted = reports
    assert len(plain) == len(counted)
    assert {load.pace for load in plain} == {None}
    assert counted[-1].pace.num_items == 3


class FakeEngines:
    loads: tuple[LoadFigures, ...] = (LoadFigures(), LoadFigures())


def pace(num_items: int, late_ns: int) -> LoadFigures:
    counts = PaceCounts(dilation=2, num_items=num_items, item_ns=num_items * 1_000_000, late_ns=late_ns)
    return LoadFigures(pace=counts)


def test_a_late_run_is_reported_as_invalid_once_an_interval(caplog):
    engines = FakeEngines()
    lines = PaceLines(engines, None)
    assert lines.lines() == []
    engines.loads = (LoadFigures(), pace(100, 100 * 50_000))
    reported = "engine 1: paced, times dilated x 2; 100 items of 1000 us taken in 50 us late: 5.0% of an item"
    assert lines.lines() == [reported]
    assert lines.lines() == []
    assert not caplog.messages
    engines.loads = (LoadFigures(), pace(200, 100 * 50_000 + 100 * 51_000))
    assert lines.lines() == []
    [warning] = caplog.messages
    assert "taken in 51 us late: 5.1% of an item, above the 5% of a valid run: raise --pace-dilation" in warning
    assert caplog.records[0].levelname == "WARNING"
    engines.loads = (LoadFigures(), pace(10, 0))  # it was started again
    assert lines.lines() == [
        "engine 1: paced, times dilated x 2; 10 items of 1000 us taken in 0 us late: 0.0% of an item"
    ]


class FakeCoordinator:
    """A coordinator of two workers, of which one has reported."""

    def __init__(self, counts: PaceCounts) -> None:
        figures = WorkerFigures(
            num_waiting=(0,), oldest_ns=(0,), idle_ns=0, lived_ns=1, num_sent=(0, 0), sent_bytes=(0, 0), num_dropped=0,
            pace=counts,
        )  # fmt: skip
        place = {
            "launch": 0,
            "num_restarts": 0,
            "num_doubts": 0,
            "is_draining": False,
            "num_experts": 0,
            "phase": "serving",
        }
        self._views = [
            WorkerView(name="engine 0", kind=WorkerKind.ATTENTION, number=0, figures=None, **place),
            WorkerView(name="expert worker 0", kind=WorkerKind.EXPERTS, number=0, figures=figures, **place),
        ]

    def views(self) -> list[WorkerView]:
        return self._views

    def name(self, worker: int) -> str:
        return self._views[worker].name


def test_workers_of_a_group_have_lines_and_metrics_of_their_own():
    counts = PaceCounts(
        dilation=4, num_items=10, item_ns=30_000_000, late_ns=300_000, num_messages=7, message_late_ns=700_000
    )
    coordinator = FakeCoordinator(counts)
    [line] = PaceLines(FakeEngines(), coordinator).lines()
    assert line.startswith("expert worker 0: paced, times dilated x 4; 10 items of 3000 us taken in 30 us late, ")
    assert line.endswith("late, 7 messages 100 us late: 3.3% of an item")
    samples = [sample for metric in group_metrics(coordinator) for sample in metric.samples]
    values = {sample.name: sample.value for sample in samples if sample.labels.get("worker") == "expert worker 0"}
    assert values["moestro:worker_pace_dilation"] == 4
    assert values["moestro:worker_paced_items_total"] == 10
    assert values["moestro:worker_paced_item_seconds_total"] == 0.03
    assert values["moestro:worker_paced_late_seconds_total"] == 0.0003
    assert values["moestro:worker_paced_messages_total"] == 7
    assert values["moestro:worker_paced_messages_late_seconds_total"] == 0.0007


def test_late_messages_make_a_run_invalid_too(caplog):
    counts = PaceCounts(
        dilation=4, num_items=10, item_ns=30_000_000, late_ns=300_000, num_messages=7, message_late_ns=1_400_000
    )
    assert PaceLines(FakeEngines(), FakeCoordinator(counts)).lines() == []
    assert "7 messages 200 us late: 6.7% of an item, above the 5% of a valid run" in caplog.text


# --- the real command -------------------------------------------------------------------------------------------------

DILATION = 8
PACED = ("qwen3-30b-a3b", "--device", "paced:a100", "--paced-arithmetic", "none", "--pace-dilation", str(DILATION))


def worker_figures(running: Running, worker: str) -> dict[str, float]:
    """Metrics of one worker, by name; a worker reports once a second."""
    values = metrics(running)
    return {name.partition("{")[0]: value for name, value in values.items() if f'worker="{worker}"' in name}


def test_a_dilated_group_of_two_workers_tells_its_dilation_and_lateness(tmp_path):
    flags = (*REAL, *PACED, "--mode", "async", "--attention", "1", "--experts", "1", "--no-standby")
    running = Running(flags, tmp_path)
    try:
        began = time.monotonic()
        assert complete(running, max_tokens=3, ignore_eos=True).status == 200
        took_s = time.monotonic() - began
        link_s = DILATION * LINK.transfer_ns(0) / 1e9
        assert took_s > 3 * 48 * 2 * link_s, "48 layers, there and back"
        wait_until(lambda: is_idle(running))
        for worker in ("engine 0", "expert worker 0"):
            wait_until(
                lambda name=worker: worker_figures(running, name).get("moestro:worker_paced_messages_total", 0) >= 144
            )
            found = worker_figures(running, worker)
            assert found["moestro:worker_pace_dilation"] == DILATION
            assert found["moestro:worker_paced_item_seconds_total"] > 0
            assert found["moestro:worker_paced_late_seconds_total"] > 0
            assert found["moestro:worker_paced_messages_late_seconds_total"] > 0
        [card] = call(running, "GET", "/v1/models").json["data"]
        assert card["pace_dilation"] == DILATION
        assert "All times are dilated" in " ".join(running.text.split())
        assert running.stop() == 0
    finally:
        running.kill()


def test_a_dilated_engine_tells_its_lateness(tmp_path):
    running = Running((*REAL, *PACED), tmp_path)
    try:
        assert complete(running, max_tokens=4, ignore_eos=True).status == 200
        values = metrics(running)
        found = {name.partition("{")[0]: value for name, value in values.items() if 'engine="0"' in name}
        assert found["moestro:pace_dilation"] == DILATION
        assert found["moestro:paced_items_total"] >= 4
        decode_s = COST.step_ns(Batch(np.array([20]), np.array([1]))) / 1e9
        assert found["moestro:paced_item_seconds_total"] > 0.1 * DILATION * decode_s
        assert found["moestro:paced_late_seconds_total"] > 0
        assert running.stop() == 0
    finally:
        running.kill()
