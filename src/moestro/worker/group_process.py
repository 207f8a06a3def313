"""A worker of a group in `async` mode: a home with attention, a worker with experts, or both in one process.

load      open the device of this worker's part, and listen at its address
join      tell the coordinator; it answers with the members once all have joined
connect   say hello to the others, and wait for theirs
serve     the loop of all ranks, with one inbox for the API server, the other workers and timers
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from moestro.config.launch_spec import GroupSpec, LaunchSpec
from moestro.core.experts.expert_table import ExpertLayers
from moestro.core.load_figures import PaceCounts
from moestro.core.request import ModelInfo
from moestro.core.stages import StagedDevice
from moestro.engine.rank import Rank
from moestro.engine.settings import SchedulerOptions
from moestro.flow.dispatcher import PeerSettings
from moestro.flow.executor import FlowExecutor
from moestro.flow.registry import make_step_policy
from moestro.wire.hop_frames import Hello, HopLimits, TensorFrames
from moestro.wire.messages import Joined, Members, Ready
from moestro.wire.sockets import ListenAddress
from moestro.worker.channel import Channel
from moestro.worker.peer_inbox import PeerInbox, SlotMemory, near_workers
from moestro.worker.peer_links import LinkPace, PeerLinks
from moestro.worker.rank_builder import ExpertRank, OnPhase, make_home, side_jobs_of
from moestro.worker.rank_loop import following_grammars, run_rank
from moestro.worker.two_phase import Channels, TwoPhase

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSizes:
    """Sizes of a worker's device.

    Attributes:
        num_rows: tokens that may be in the network at once; 0 without attention.
        num_guests: tokens of others that may be among the worker's experts; 0 without experts.
    """

    num_rows: int
    num_guests: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkerPart:
    """What a worker has loaded.

    Attributes:
        device: computes the worker's part of the network.
        num_experts: logical experts of a layer of the network.
        info: the whole network, and the KV cache. None means a worker without attention.
        tensors: turns the device's tensors into frames.
        memory: of the experts, which other ones can replace; None without experts.
        launch_ahead: items with the device at once.
        link_pace: holds messages for as long as a modelled link takes; None with a device that is not paced.
        pace_counts: supplier of the counts of a paced device.
        channels: opens channels for large tensors to other workers. None means that all tensors go with their messages,
            as with a device that computes nothing, or encrypted ones.
        on_home: called with the rank of a worker with attention, which is made after its device.
    """

    device: StagedDevice
    num_experts: int
    info: ModelInfo | None
    tensors: TensorFrames
    memory: SlotMemory | None = None
    launch_ahead: int = 1
    link_pace: LinkPace | None = None
    pace_counts: Callable[[], PaceCounts | None] = lambda: None
    channels: Channels | None = None
    on_home: Callable[[Rank], None] = lambda _: None


# (spec, sizes, called with the name of each phase) -> what the worker has loaded
LoadPart = Callable[[LaunchSpec, WorkerSizes, OnPhase], WorkerPart]


def num_home_rows(limits: SchedulerOptions) -> int:
    """Compute the tokens that a home has in the network at most.

    A sequence has one unit in flight, and most units are decodes; the classes have as many places each.
    """
    return 2 * limits.max_num_seqs + limits.max_num_batched_tokens


def worker_sizes(spec: LaunchSpec, group: GroupSpec) -> WorkerSizes:
    """Compute the sizes of a worker's device from the settings."""
    num_rows = num_home_rows(spec.scheduler)
    return WorkerSizes(
        num_rows=num_rows if group.is_home else 0,
        num_guests=(group.stepping.expert_credits or num_rows) * group.num_homes if group.has_experts else 0,
    )


def serve_group_worker(spec: LaunchSpec, group: GroupSpec, channel: Channel, part: WorkerPart) -> None:
    """Run one worker, which has loaded its part, until the API server asks it to end.

    Raises:
        EngineDiedError: another worker did not connect.
    """
    shape = part.device.shape
    layers = tuple(layer for layer, is_sparse in enumerate(shape.is_sparse) if is_sparse)
    experts = ExpertLayers(num_layers=shape.num_layers, layers=layers, num_experts=part.num_experts)
    limits = HopLimits(
        worker=group.worker,
        num_workers=group.num_workers,
        num_layers=shape.num_layers,
        num_chosen=shape.num_chosen,
        num_slots=shape.num_experts,
        num_places=shape.num_places,
        num_guests=shape.num_guests,
    )
    endpoint = ListenAddress(spec.peer_address, spec.keys)
    way = _two_phase(group, part) if part.link_pace is None else part.link_pace
    hello = Hello(group.worker, spec.launch, "cpu" if part.channels is None else part.channels.device_name)
    links = PeerLinks(hello, endpoint, part.tensors, limits, way)
    try:
        inbox = PeerInbox(group, channel, links, part.memory, part.pace_counts)
        channel.send(Joined(links.address, experts))
        members = inbox.await_members()
        if members is None:
            return
        executor = _executor(spec, group, part, links, members)
        inbox.use(executor)
        if not inbox.await_peers():
            return
        note = "" if part.channels is None else part.channels.describe(list(links.devices.values()))
        if note:
            logger.info("%s", note)
        if part.info is None:
            channel.send(Ready(None))
            run_rank(ExpertRank(executor), inbox, channel.now_ns)
            return
        home = make_home(spec, executor, part.info)
        part.on_home(home)
        with following_grammars(spec, home, part.info, inbox) as source:
            channel.send(Ready(part.info))
            run_rank(home, source, channel.now_ns, side_jobs_of(spec, home))
    finally:
        links.close()


def _two_phase(group: GroupSpec, part: WorkerPart) -> TwoPhase | None:
    """Return how large tensors travel; None means with their messages."""
    if part.channels is None:
        return None
    return TwoPhase(channels=part.channels, given_limit=group.stepping.inline_limit)


def _executor(spec: LaunchSpec, group: GroupSpec, part: WorkerPart, links: PeerLinks, members: Members) -> FlowExecutor:
    stepping = group.stepping
    name = stepping.attention_step_policy if group.is_home else stepping.expert_step_policy
    peers = PeerSettings(
        worker=group.worker,
        num_workers=group.num_workers,
        table=members.table.whole_table(),
        num_credits=stepping.expert_credits or num_home_rows(spec.scheduler),
        dtype=part.tensors.dtype,
        incarnation=spec.launch,
        counts_visits=spec.records_events,
        is_near=near_workers(members.addresses, group.worker),
    )
    policy = make_step_policy(name, spec.stepping.max_be_wait)
    return FlowExecutor(part.device, policy, part.launch_ahead, peers, links)
