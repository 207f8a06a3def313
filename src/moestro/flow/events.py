"""What the flow core takes note of (events), and what it wants done (commands)."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import ExpertTable
from moestro.core.stages import HopMessage, StageItem, StageResult
from moestro.core.work import Int32s, Plan, StepResult

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
