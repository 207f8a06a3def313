"""Events that the flow core takes note of, commands that it gives, and the items that the step policy chooses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import ExpertTable
from moestro.core.stages import (
    Attention,
    Experts,
    HopMessage,
    Merge,
    Passage,
    Sample,
    StageItem,
    StageResult,
    StageShape,
)
from moestro.core.views import ATTENTION, BE, EVERY_EXPERT, LS, NUM_CLASSES, Run
from moestro.core.work import Int32s, Plan, StepResult
from moestro.errors import InvariantError
from moestro.flow.micro_queues import MicroQueues
from moestro.flow.passed_over import Tokens
from moestro.flow.remote_tokens import RemoteTokens
from moestro.flow.token_pool import NO_MERGES, TokenPool

Int64s = NDArray[np.int64]


class PlanSubmitted(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Event: a plan is to be computed."""

    plan: Plan


class Done(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Event: the oldest launched item has a result."""

    result: StageResult


class Arrived(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Event: a message of another worker is here."""

    message: HopMessage


class TableChanged(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Event: experts live elsewhere from now on. What is under way to workers that still compute stays there.

    Attributes:
        is_near: whether each worker is on this worker's machine. None means that all are.
    """

    table: ExpertTable
    is_near: tuple[bool, ...] | None = None


class PeerLost(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Event: what was sent to this worker and not answered is lost. It is sent again, by the present table."""

    worker: int


class Tick(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Event: the device may have room for more."""


Event = PlanSubmitted | Done | Arrived | TableChanged | PeerLost | Tick


class Launch(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Command: start this item."""

    item: StageItem


class Withdraw(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Command: give up what has not begun of expert batches and passages."""


class Emit(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Command: these units are done."""

    result: StepResult


class Send(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Command: send a message, whose tensor the device reads now.

    Attributes:
        message: without its tensor.
        places: int32[rows], places whose inputs are sent; with `choices`, whose contributions.
        choices: int32[rows], of a reply. None means a dispatch.
    """

    message: HopMessage
    places: Int32s
    choices: Int32s | None


class Store(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Command: the device takes in rows of a message's tensor.

    Attributes:
        tensor: of the message.
        rows: int64[n], rows of the tensor. None means all rows in order.
        places: int32[n], where they go: inputs; with `choices`, contributions.
        choices: int32[n], of a reply. None means a dispatch.
    """

    tensor: Any
    rows: Int64s | None
    places: Int32s
    choices: Int32s | None


Command = Launch | Withdraw | Emit | Send | Store


# The items, which are made out of the queues.

_NO_UNITS = np.empty(0, np.int64)
_NO_PLACES = np.empty(0, np.int32)


@dataclass(slots=True, eq=False)
class LaunchedItem:
    """An item that is with the device.

    Attributes:
        ids: int64[n], units of the item, in its order; of `Experts` none.
    """

    item: StageItem
    ids: Int64s


class ItemMaker:
    """Takes units and pairs out of the queues, and makes items of them.

    Args:
        shape: of the device.
        pool, remote: tokens of the device.
        queues: of the device.
        is_alone: whether the device has all experts, so that a wave may pass several layers as one item.

    Attributes:
        is_alone: as above.
    """

    def __init__(
        self, shape: StageShape, pool: TokenPool, remote: RemoteTokens, queues: MicroQueues, *, is_alone: bool
    ) -> None:
        self._shape, self._pool, self._remote, self._queues = shape, pool, remote, queues
        self.is_alone = is_alone

    def make(self, run: Run) -> LaunchedItem:
        """Make the item that a step policy chose.

        Raises:
            InvariantError: nothing can run there.
        """
        launched = self._attention(run) if run.group == ATTENTION else self._experts(run)
        if launched is None:
            raise InvariantError(f"the step policy chose {run}, where nothing can run")
        return launched

    def make_alone(self, run: Run, plan: Plan) -> LaunchedItem | None:
        """Make one item of a plan that is alone and has no rows yet. None: `run` does not take all of it to its end."""
        num_tokens, classes = plan.num_tokens, plan.units.service_class
        if (run.layer, run.group) != (0, ATTENTION) or run.until <= self._shape.num_layers:
            return None
        if num_tokens > min(run.max_rows, run.max_unit_tokens, self._shape.num_places):
            return None
        if len(run.classes) < NUM_CLASSES and not np.isin(classes, run.classes).all():
            return None
        rows = np.arange(num_tokens, dtype=np.int32)
        places = rows if self._shape.num_chosen else _NO_PLACES
        return LaunchedItem(Passage(0, run.until, plan.units, rows, places, NO_MERGES), _NO_UNITS)

    def free_places(self) -> LaunchedItem | None:
        """End the layer of best-effort units that hold places, if urgent units lack some.

        The places are free at once, because the device merges before any later item uses them.
        """
        if not self._pool.num_units or not self._queues.attention.is_short_of_places(LS):
            return None
        found = self._queues.attention.holding_places(BE)
        if found is None:
            return None
        layer, ids = found
        merges = self._pool.merges(self._pool.wave(ids))
        self._pool.release_places(merges)
        self._queues.attention.recount(BE, layer)
        return LaunchedItem(Merge(layer - 1, merges), ids)

    def tokens_of(self, launched: LaunchedItem) -> Tokens:
        """Tokens with which an item has anything to do."""
        if not isinstance(launched.item, Experts):
            return Tokens(launched.ids)
        places = launched.item.places
        own, remote = places[places < self._shape.num_places], places[places >= self._shape.num_places]
        return Tokens(np.unique(self._pool.units_at(own)).astype(np.int64), np.unique(remote))

    def has_best_effort_batches(self, launched: LaunchedItem) -> bool:
        """Whether an item has expert batches of best-effort tokens alone, for which urgent tokens need not wait.

        Any best-effort unit of an attention or a passage counts, because a passage's batches are not known.
        """
        if not isinstance(launched.item, Experts):
            return bool((self._pool.service_class[launched.ids] == BE).any())
        places, counts = launched.item.places, launched.item.counts
        is_own = places < self._shape.num_places
        classes = np.empty(len(places), np.uint8)
        classes[is_own] = self._pool.classes_at(places[is_own])
        classes[~is_own] = self._remote.classes_at(places[~is_own])
        first = np.minimum.reduceat(classes, counts.cumsum() - counts)  # LS is the least class
        return bool((first == BE).any())

    def _attention(self, run: Run) -> LaunchedItem | None:
        ids = self._queues.attention.take(run)
        if len(ids) == 0:
            return None
        wave = self._pool.wave(ids)
        merges = self._pool.merges(wave)
        num_lacking = len(wave.rows) - len(merges)
        item: Attention | Passage | Sample
        if run.until > run.layer and self.is_alone and num_lacking <= self._pool.num_free_places:
            places = self._pool.take_places(wave, merges) if self._shape.num_chosen else _NO_PLACES
            item = Passage(run.layer, run.until, wave.units, wave.rows, places, merges)
        elif run.layer == self._shape.num_layers:
            item = Sample(wave.units, wave.rows, merges)
        else:
            places = self._pool.take_places(wave, merges) if self._shape.is_sparse[run.layer] else _NO_PLACES
            item = Attention(run.layer, wave.units, wave.rows, places, merges)
        return LaunchedItem(item, wave.ids)

    def _experts(self, run: Run) -> LaunchedItem | None:
        if run.group == EVERY_EXPERT:
            batches = self._queues.experts.take_every(run.layer, run.max_rows, run.classes)
        else:
            batches = self._queues.experts.take_one(run.layer, run.group - 1, run.max_rows, run.classes)
        if len(batches.experts) == 0:
            return None
        return LaunchedItem(
            Experts(run.layer, batches.experts, batches.counts, batches.places, batches.choices), _NO_UNITS
        )
