"""The most requests a second that simulated engines answer, and rates as a share of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import NS_PER_S
from moestro.errors import ConfigError
from moestro.sim.load.arrivals import Arrivals, AtTimes
from moestro.sim.scenario import make_scenario, run
from moestro.sim.settings import SimSettings
from moestro.workload.generated.sessions import Pace, Sessions

FIRST, LAST = (
    0.1,
    0.9,
)  # shares of the answers between which the rate is taken: before and after it, engines are not full
_FEWEST = 20  # answers, so that at least two lie before and after the part that counts
_START_RATE = 1.0  # of generated sessions, until a first saturation is known


class Saturation(msgspec.Struct, frozen=True, kw_only=True):
    """The rate that a load was found from.

    Attributes:
        policy: title of the policy under which it was found.
        requests_per_s: most requests a second, when all requests arrive at once.
        load: share of it that is offered.
        rate: offered requests a second.
    """

    policy: str
    requests_per_s: float
    load: float
    rate: float

    def sentence(self, num_requests: int) -> str:
        """Say how the rate was found."""
        return (
            f"saturation: {self.requests_per_s:.4g} requests/s ({self.policy}; all {num_requests:,} requests at once,"
            f" from the end of the first {FIRST:.0%} of the answers to that of {LAST:.0%}); load {self.load:g} is"
            f" {self.rate:.4g} requests/s"
        )


def at_load(settings: SimSettings, directory: Path) -> tuple[SimSettings, Saturation]:
    """Replace the load of a simulation by a rate, which a run of its first policy finds.

    Generated sessions are run twice, because how soon conversations return depends on their rate.

    Args:
        settings: settings whose workload has a load.
        directory: directory of relative paths.

    Returns:
        The settings with a rate, and how it was found.
    """
    load = settings.workload.load
    assert load is not None, "the workload has a load"
    found, rate = 0.0, _START_RATE
    for _ in range(2 if settings.workload.sessions is not None else 1):
        found = saturation_rate(_at_rate(settings, rate), directory)
        rate = load * found
    saturation = Saturation(policy=settings.policies[0].title, requests_per_s=found, load=load, rate=rate)
    return _at_rate(settings, rate), saturation


def saturation_rate(settings: SimSettings, directory: Path) -> float:
    """Return the rate at which engines answer under the first policy when all requests arrive at once.

    Raises:
        ConfigError: there are too few requests to tell.
    """
    scenario = make_scenario(settings, directory)
    at_once = np.arange(len(scenario.workload), dtype=np.int64)  # a nanosecond apart, so that their order is theirs
    results = run(replace(scenario, arrivals=AtTimes(at_once, _order(scenario.arrivals))), settings.policies[0])
    ends = results.last_token_ns[results.is_answered]
    if len(ends) < _FEWEST:
        raise ConfigError(
            f"[workload] load needs {_FEWEST} answers to find a rate, and got {len(ends)}: give more requests"
        )
    return middle_rate(ends)


def middle_rate(end_ns: NDArray[np.int64]) -> float:
    """Return requests a second between the ends of the first and the last tenth.

    Args:
        end_ns: int64[n], ends of answers in ns.

    Raises:
        ConfigError: one step ends them all, so that there is no rate.
    """
    ends = np.sort(end_ns)
    first, last = int(FIRST * len(ends)), int(LAST * len(ends))
    if ends[first] == ends[last]:
        raise ConfigError(
            f"a rate needs answers that end one after the other, and {last - first + 1} of {len(ends)} end in the same"
            " step: give more requests than the engines compute at once (max_num_seqs)"
        )
    return (last - first) / (float(ends[last] - ends[first]) / NS_PER_S)


def _at_rate(settings: SimSettings, rate: float) -> SimSettings:
    workload = msgspec.structs.replace(settings.workload, load=None, rate=rate)
    return msgspec.structs.replace(settings, workload=workload)


def _order(arrivals: Arrivals) -> NDArray[np.int64] | None:
    """Return the order of arrival, or None for the order of the rows."""
    if not isinstance(arrivals, Sessions):
        return None
    order: NDArray[np.int64] = np.argsort(arrivals.arrival_ns(Pace()), kind="stable")
    return order
