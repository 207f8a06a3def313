"""The tokens that wait for credits of one worker."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from moestro.core.experts.hops import HopRecords
from moestro.core.views import NUM_CLASSES
from moestro.core.work import Int32s
from moestro.flow.token_pool import TokenPool

_FIRST = np.ones(1, np.bool_)


class Parcel(NamedTuple):
    """Tokens for one worker.

    Attributes:
        layer: layer of the experts.
        records: HOP_RECORD[n], ordered by row; rows are numbered from 0.
        places: int32[rows], the token of each row.
    """

    layer: int
    records: HopRecords
    places: Int32s


class Outbox:
    """Keeps parcels until there are credits: latency-sensitive tokens leave first, those of a class in order.

    Args:
        pool: the home's tokens, which may be given up while they wait.
    """

    def __init__(self, pool: TokenPool) -> None:
        self._pool = pool
        self._waiting: list[deque[Parcel]] = [deque() for _ in range(NUM_CLASSES)]

    def __bool__(self) -> bool:
        return any(self._waiting)

    def add(self, parcel: Parcel) -> None:
        """Let a parcel wait. One of several classes becomes one parcel for each."""
        layer, records, _ = parcel
        classes = records["service_class"]
        lowest, highest = int(classes.min()), int(classes.max())
        if lowest == highest:
            self._waiting[lowest].append(parcel)
            return
        for service_class in range(lowest, highest + 1):
            own = records[classes == service_class]
            self._waiting[service_class].append(make_parcel(layer, own, own["place"]))

    def take(self, num_rows: int) -> Parcel | None:
        """Take the next parcel without the tokens that were given up since.

        Args:
            num_rows: most tokens; of a larger parcel the others wait on.

        Returns:
            A parcel with tokens. None means that nothing waits.
        """
        for waiting in self._waiting:
            while waiting:
                layer, records, places = parcel = self._still_valid(waiting.popleft())
                if len(places) > num_rows:
                    cut = int(records["row"].searchsorted(num_rows))
                    waiting.appendleft(make_parcel(layer, records[cut:], records["place"][cut:]))
                    return Parcel(layer, records[:cut], places[:num_rows])
                if len(places):
                    return parcel
        return None

    def empty(self) -> list[Parcel]:
        """Take all parcels, without the tokens that were given up since."""
        parcels = [self._still_valid(parcel) for waiting in self._waiting for parcel in waiting]
        for waiting in self._waiting:
            waiting.clear()
        return [parcel for parcel in parcels if len(parcel.places)]

    def _still_valid(self, parcel: Parcel) -> Parcel:
        """Leave out tokens that were given up since."""
        records = parcel.records
        is_valid = self._pool.generation[records["place"]] == records["generation"]
        if is_valid.all():
            return parcel
        return make_parcel(parcel.layer, records[is_valid], records["place"][is_valid])


def make_parcel(layer: int, records: HopRecords, at: Int32s) -> Parcel:
    """Make a parcel of records that are ordered by token, and number their rows.

    Args:
        at: int32[n], place of each record.
    """
    if len(at) < 2:
        records["row"] = 0
        return Parcel(layer, records, at)
    is_new = at[1:] != at[:-1]
    num_rows = 1 + np.count_nonzero(is_new)
    if num_rows == len(at):
        records["row"] = np.arange(num_rows)
        return Parcel(layer, records, at)
    is_new = np.concatenate([_FIRST, is_new])
    records["row"] = is_new.cumsum() - 1
    return Parcel(layer, records, at[is_new])
