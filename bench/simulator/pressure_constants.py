"""Sweeps the constants of expert pressure: each one alone, the other as it is.

    python bench/simulator/pressure_constants.py --routing DIR --json bench/results/simulator/pressure_constants.json

Simulated: four engines that hold a quarter of the experts each serve sessions from benchmarks of the recorded choices
of GPT-OSS-20B (--routing is the folder of the record). A session lasts 20 to 60 s (short) or 60 to 180 s (long), and
the next one is of another benchmark. Every 2 s the engines report their visits, which follow the record's order from a
random token on, and the estimate is compared with the pressure that the benchmarks' whole record gives for the present
sessions.

error: root of the mean squared difference, over the standard deviation of the true pressures; 1 is the error of an
estimate that knows the mean and nothing else. right: how often the engine with the least estimate has the least true
pressure; a quarter of the time by chance. A star marks the value in use.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moestro.config.run_record import run_record
from moestro.core.clock import NS_PER_S
from moestro.core.experts import expert_load
from moestro.core.experts.expert_load import expert_pressures
from moestro.core.experts.expert_table import spread_evenly
from moestro.server.experts.expert_signals import HALF_LIFE_NS, PERIOD_S

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from placement_loads import domains, read_trace
from shared.results import make_parser, save
from shared.routed_model import NUM_EXPERTS, rows_of

NUM_ENGINES, NUM_TICKS = 4, 150
SESSIONS_S = {"short": (20.0, 60.0), "long": (60.0, 180.0)}
RATES = (5, 50, 500)  # tokens a second of an engine: a single chat, a few, a full batch
HALF_LIFE_S = HALF_LIFE_NS / NS_PER_S
HALF_LIVES_S = (1.25, 2.5, 5.0, 10.0, 20.0, 40.0)
PRIORS = (1.0, 16.0, 64.0, 256.0, 1024.0)


@dataclass(frozen=True, eq=False)
class Domain:
    """A benchmark of the record.

    Attributes:
        cells: int16[tokens, layers * chosen], layer * experts + expert of each visit.
        visits: float64[layers, experts], visits of a token to each expert, on average.
    """

    cells: np.ndarray
    visits: np.ndarray

    def draw(self, num_tokens: int, rng: np.random.Generator) -> np.ndarray:
        """float64[layers, experts], visits of consecutive tokens from a random one on."""
        first = rng.integers(len(self.cells) - num_tokens)
        return visits_of(self.cells[first : first + num_tokens], len(self.visits))


def domain_of(rows: np.ndarray) -> Domain:
    """Return the benchmark whose tokens made these choices, uint8[tokens, layers, chosen]."""
    num_layers = rows.shape[1]
    cells = rows.astype(np.int16) + (np.arange(num_layers, dtype=np.int16) * NUM_EXPERTS)[:, None]
    cells = cells.reshape(len(rows), -1)
    return Domain(cells, visits_of(cells, num_layers) / len(rows))


def visits_of(cells: np.ndarray, num_layers: int) -> np.ndarray:
    """float64[layers, experts], visits of some tokens."""
    return np.bincount(cells.ravel(), minlength=num_layers * NUM_EXPERTS).reshape(num_layers, -1).astype(float)


@contextmanager
def prior(value: float) -> Iterator[None]:
    """Use another prior inside the block."""
    before, expert_load.PRIOR_VISITS = expert_load.PRIOR_VISITS, value
    try:
        yield
    finally:
        expert_load.PRIOR_VISITS = before


def run(found: list[Domain], rate: int, half_life_s: float, seed: int, sessions: str = "short") -> tuple[float, float]:
    """Return the error, and how often the least loaded engine is found."""
    rng = np.random.default_rng([seed, rate])
    num_layers = len(found[0].visits)
    parts = spread_evenly(num_layers, NUM_EXPERTS, list(range(NUM_ENGINES)), NUM_ENGINES).parts
    visits = np.zeros((NUM_ENGINES, num_layers, NUM_EXPERTS))
    of_engine, until_s = rng.integers(len(found), size=NUM_ENGINES), np.zeros(NUM_ENGINES)
    estimates, truths = [], []
    for tick in range(NUM_TICKS):
        for engine in np.flatnonzero(until_s <= tick * PERIOD_S).tolist():
            of_engine[engine] = (of_engine[engine] + rng.integers(1, len(found))) % len(found)
            until_s[engine] = tick * PERIOD_S + rng.uniform(*SESSIONS_S[sessions])
        present = [found[each] for each in of_engine.tolist()]
        visits *= 0.5 ** (PERIOD_S / half_life_s)
        visits += np.stack([each.draw(round(rate * PERIOD_S), rng) for each in present])
        estimates.append(expert_pressures(visits, parts))
        truths.append(expert_pressures(np.stack([each.visits for each in present]) * 1e9, parts))
    warm = NUM_TICKS // 10
    estimate, truth = np.array(estimates[warm:]), np.array(truths[warm:])
    is_right = np.take_along_axis(truth, estimate.argmin(axis=1)[:, None], 1)[:, 0] == truth.min(axis=1)
    error = float(np.sqrt(np.mean((estimate - truth) ** 2)) / truth.std())
    return error, float(is_right.mean())


def sweep(found: list[Domain], num_seeds: int) -> dict[str, dict[str, list[float]]]:
    """Return (error, right) by case and value: means of the seeds."""
    used = expert_load.PRIOR_VISITS
    cases = [("half_life_s", value, value, used) for value in HALF_LIVES_S]
    cases += [("prior_visits", value, HALF_LIFE_S, value) for value in PRIORS]
    result: dict[str, dict[str, list[float]]] = {}
    for constant, value, half_life_s, visits in cases:
        star = "*" if (half_life_s, visits) == (HALF_LIFE_S, used) else ""
        for sessions in SESSIONS_S:
            for rate in RATES:
                with prior(visits):
                    runs = [run(found, rate, half_life_s, seed, sessions) for seed in range(num_seeds)]
                means = [round(statistics.mean(column), 3) for column in zip(*runs, strict=True)]
                result.setdefault(f"{constant}, {sessions} sessions, {rate} tokens/s", {})[f"{value:g}{star}"] = means
    return result


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--routing", type=Path, required=True, help="folder of the recorded choices")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    conditions = run_record("simulated")
    trace = read_trace(args.routing)
    found = sweep([domain_of(rows_of(trace, name)) for name in domains(trace)], args.seeds)
    for case, figures in found.items():
        print(f"{case}:", ", ".join(f"{value} {error:.2f}/{right:.2f}" for value, (error, right) in figures.items()))
    save(args.json, conditions, {"seeds": args.seeds, "figures": ["error", "right"], **found})


if __name__ == "__main__":
    main()
