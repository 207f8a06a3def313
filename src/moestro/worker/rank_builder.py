"""Builds the rank of each mode from a launch spec, with the collection of its expert load.

The collection works beside the steps. Its failure ends it, and never the rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial

from moestro.config.launch_spec import LaunchSpec
from moestro.config.linux_process import available_memory_bytes
from moestro.core.load_figures import IDLE, LoadFigures
from moestro.core.request import ModelInfo, NewOutputs, Request
from moestro.core.stages import StagedDevice
from moestro.core.work import Device, IsWanted, StepResult, never_wanted
from moestro.engine.lock_step import LockStepRank
from moestro.engine.rank import (
    UNCHANGED,
    CacheChanges,
    CacheEvents,
    Rank,
    build_preemptive_rank,
    build_rank,
    changes_of,
    recorder_of,
)
from moestro.engine.scheduler import Scheduler
from moestro.engine.settings import SchedulerSettings
from moestro.errors import InvariantError
from moestro.flow.executor import FlowExecutor
from moestro.model.settings import LocalRank
from moestro.placement.load_window import LoadWindow
from moestro.placement.settings import ExpertLoadSettings
from moestro.wire.messages import DropLayer, ExpertReport, FromRank, MoveLayer, ReadExperts, report_of
from moestro.worker.kv_publisher import KvPublisher
from moestro.worker.rank_loop import SideJobs

logger = logging.getLogger(__name__)


class ExpertCollection:
    """The window of one rank's expert load; implements `engine.rank.ExpertObserver`.

    Args:
        settings: Half-life of the window.

    Attributes:
        error: Why nothing is counted any more; "" means that everything is.
    """

    def __init__(self, settings: ExpertLoadSettings) -> None:
        self._half_life = settings.expert_load_half_life
        self._window: LoadWindow | None = None  # made when the first counts show its shape
        self._num_skipped = 0  # steps before it
        self.error = ""

    def observe(self, result: StepResult) -> None:
        """Implement `ExpertObserver.observe`."""
        window = self._window
        try:
            if window is not None and result.expert_choices is None:  # most steps
                window.observe(result.expert_counts)  # type: ignore[arg-type]
            elif not self.error:
                self._observe(result)
        except Exception as error:
            self._stop(error)

    def skip(self, num_steps: int) -> None:
        """Implement `ExpertObserver.skip`."""
        if self._window is None:
            self._num_skipped += num_steps
        else:
            self._window.skip(num_steps)

    def _observe(self, result: StepResult) -> None:
        counts, choices = result.expert_counts, result.expert_choices
        assert counts is not None, "the rank passes on results with counts"
        if self._window is None:
            num_layers, num_experts = counts.shape
            self._window = LoadWindow(num_layers, num_experts, self._half_life)
            self._window.skip(self._num_skipped)
        self._window.observe(counts)
        if choices is not None:
            num_layers, _, num_chosen = choices.shape
            self._window.observe_choices(choices, int(counts.sum()) // (num_layers * num_chosen))

    def _stop(self, error: Exception) -> None:
        self.error, self._window = f"{type(error).__name__}: {error}", None
        logger.error("the load of experts is no longer counted; requests are served as before", exc_info=error)

    def report(self, question: ReadExperts) -> ExpertReport:
        """Answer the API server."""
        if question.clear:
            self._num_skipped = 0
        window = self._window
        if window is not None:
            try:
                if question.clear:
                    window.clear()
                return report_of(question.number, window.load(with_pairs=question.with_pairs))
            except Exception:  # for instance a lack of memory for a moment
                logger.exception("the load of experts could not be reported")
        return ExpertReport(question.number, error=self.error)


# The two kinds of workers of a group, as `run_rank` drives them.


class Home(Rank):
    """A rank whose tokens visit experts of other workers, and which may compute experts for others."""

    @property
    def has_work(self) -> bool:
        """Whether there may be anything to do: remote tokens come unannounced, so only `ready_at_ns` says."""
        return True


class ExpertRank:
    """Computes experts for homes, and takes no requests; implements `worker.rank_loop.Steppable`.

    Args:
        executor: of a device without attention.
    """

    has_work = True  # remote tokens come unannounced, so only `ready_at_ns` says

    def __init__(self, executor: FlowExecutor) -> None:
        self._executor = executor

    def add(self, request: Request, now_ns: int) -> int:
        """Refuse: the API server sends requests to homes alone."""
        raise InvariantError("a request came to a worker without attention")

    def abort(self, request_id: str, now_ns: int) -> None:
        """Ignore: there are no requests."""

    def take_given_way(self) -> list[str]:
        """Return none: no request waits here."""
        return []

    def wake(self, step: int) -> None:
        """Refuse: workers of this group take no steps together."""
        raise InvariantError("a worker without attention cannot take part in a step")

    def outputs(self, now_ns: int, is_wanted: IsWanted = never_wanted) -> NewOutputs:
        """Compute, or take what the device has computed; replies leave through the links."""
        self._executor.poll(now_ns, is_wanted)
        return NewOutputs()

    def begin(self, now_ns: int) -> None:
        """Start the next item."""
        self._executor.start(now_ns)

    def ready_at_ns(self) -> int | None:
        """Implement `Steppable.ready_at_ns`."""
        return self._executor.ready_at_ns()

    @property
    def num_steps(self) -> int:
        """Pieces of work since the start."""
        return self._executor.num_pieces

    def stats(self) -> LoadFigures:
        """Return figures that never change: there are no requests."""
        return IDLE


OnPhase = Callable[[str], None]  # called when a phase of the start begins
Send = Callable[[FromRank], None]  # sends a message to the API server


def make_rank(spec: LaunchSpec, device: Device, info: ModelInfo, *, runs_ahead: bool = False) -> Rank:
    """Build the rank that `spec` describes in `fused` mode, on `device`. `runs_ahead`: as in `FusedExecutor`."""
    settings = scheduler_settings(spec, info)
    return build_rank(settings, device, runs_ahead=runs_ahead, host_block_ns=info.host_block_ns)


def make_preemptive_rank(spec: LaunchSpec, device: StagedDevice, info: ModelInfo, launch_ahead: int = 1) -> Rank:
    """Build the rank that `spec` describes in `preemptive` mode, on `device`, with as many places for each class."""
    policy = spec.stepping.make_step_policy()
    settings = _for_two_classes(spec, info)
    return build_preemptive_rank(settings, device, policy, launch_ahead, passes_decodes=spec.stepping.pass_decodes)


def make_home(spec: LaunchSpec, executor: FlowExecutor, info: ModelInfo) -> Home:
    """Build the rank that `spec` describes in `async` mode, with as many places for each class."""
    return Home(Scheduler(_for_two_classes(spec, info), executor.recall), executor)


def _for_two_classes(spec: LaunchSpec, info: ModelInfo) -> SchedulerSettings:
    return replace(scheduler_settings(spec, info), max_num_urgent_seqs=spec.scheduler.max_num_seqs)


def local_rank_of(spec: LaunchSpec, num_classes: int = 1) -> LocalRank:
    """Make the rank's place on its machine. `num_classes`: classes of requests that each have `max_num_seqs` places."""
    return LocalRank(
        rank=spec.rank,
        num_ranks=spec.num_local,
        max_tokens=spec.scheduler.max_num_batched_tokens,
        max_seqs=num_classes * spec.scheduler.max_num_seqs,
        free_host_bytes=available_memory_bytes(),
    )


def scheduler_settings(spec: LaunchSpec, info: ModelInfo) -> SchedulerSettings:
    """Combine the operator's settings with what the loaded model determines."""
    return SchedulerSettings(
        num_blocks=info.num_blocks,
        num_host_blocks=info.num_host_blocks,
        block_bytes=info.block_bytes,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        **asdict(spec.scheduler),
    )


def side_jobs_of(spec: LaunchSpec, rank: Rank) -> SideJobs:
    """Make what a rank does beside its steps, and let it count the load of its experts."""
    collection = ExpertCollection(spec.expert_load)
    rank.expert_observer = collection
    return SideJobs(
        take_cache_changes=_cache_reader(spec, rank),
        pace_counts=rank.pace_counts,
        report_experts=collection.report,
        take_events=recorder_of(rank).take if spec.records_events else tuple,
        move_experts=partial(_move_experts, rank) if isinstance(rank, LockStepRank) else None,
    )


def _move_experts(rank: LockStepRank, message: MoveLayer | DropLayer) -> None:
    if isinstance(message, MoveLayer):
        rank.move_layer(message.plan)
    else:
        rank.drop_layer(message.version)


def _cache_reader(spec: LaunchSpec, rank: Rank) -> Callable[[], CacheChanges]:
    """Make the function to call after each step: it publishes changes of the prefix cache, and returns them.

    Both happen only if `spec` says so.
    """
    pool = rank.scheduler.pool
    publish: Callable[[], None] | None = None
    if spec.kv_events is not None:
        events = CacheEvents(rank.scheduler)
        publish = KvPublisher(spec.kv_events, spec.rank, events, rank.scheduler.settings.block_size).publish
    elif spec.reports_cache:
        pool.journal = []
    else:
        return lambda: UNCHANGED

    def read() -> CacheChanges:
        assert pool.journal is not None
        changes = changes_of(pool.journal) if spec.reports_cache and pool.journal else UNCHANGED
        if publish is not None:
            publish()  # it empties the journal
        else:
            pool.journal.clear()
        return changes

    return read
