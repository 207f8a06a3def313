"""Question of `moestro plan`, with all names looked up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import NS_PER_S
from moestro.cost.gpus import Gpu, gpu_named
from moestro.cost.links import Link, link_named
from moestro.cost.model import PopularityForm
from moestro.cost.networks import NetworkShape
from moestro.cost.settings import link_within, positions_of, read_network
from moestro.errors import ConfigError
from moestro.planner.settings import PlanSettings, TrafficSettings
from moestro.planner.systems import ServedSystem, system_named
from moestro.sim.closed_loop import TimedRows
from moestro.sim.records import read_record
from moestro.workload.rows import Rows
from moestro.workload.traces.reading import read_trace

Int64s = NDArray[np.int64]

_LENGTHS_ALONE = "arrivals and common prefixes of the file have no effect on a plan of throughput"


@dataclass(frozen=True, slots=True, eq=False)
class LengthSample:
    """Lengths that occur equally often.

    Attributes:
        prompt, output: tokens of each request, int64[n], at least 1.
    """

    prompt: Int64s
    output: Int64s

    @property
    def mean_prompt(self) -> float:
        """Mean tokens of a prompt."""
        return float(self.prompt.mean())

    @property
    def mean_output(self) -> float:
        """Mean tokens of an answer."""
        return float(self.output.mean())

    @property
    def mean_context(self) -> float:
        """Mean tokens in the cache of a decoding request; long answers last longer."""
        return float((self.output * (self.prompt + self.output / 2)).sum() / self.output.sum())

    @property
    def longest(self) -> int:
        """Most tokens of a request, prompt and answer."""
        return int((self.prompt + self.output).max())

    @property
    def longest_requested(self) -> int:
        """Most tokens that a simulated request may ask for: those in progress ask for the longest answer too."""
        return self.longest + int(self.output.max())

    def steady_load(self, num_first: int, num_more: int, spread_s: float, seed: int) -> TimedRows:
        """Make requests in progress, and the requests that replace them.

        Those in progress are drawn in proportion to the time that they take, and their progress evenly. Both are
        spread over equal strata, so that about equally many end in equal times.

        Args:
            num_first: requests in progress.
            num_more: further requests.
            spread_s: seconds over which the requests in progress enter, less than a request takes.
            seed: seed of the draws.
        """
        rng = np.random.default_rng([seed, num_first])
        share = self.output.cumsum() / self.output.sum()
        which = np.minimum(share.searchsorted(_strata(num_first, rng)), len(share) - 1)
        rng.shuffle(which)
        done = (_strata(num_first, rng) * self.output[which]).astype(np.int64)
        new = rng.integers(len(self.prompt), size=num_more)
        rows = Rows(
            num_prompt_tokens=np.concatenate([self.prompt[which] + done, self.prompt[new]]),
            num_output_tokens=np.concatenate([self.output[which] - done, self.output[new]]),
            is_generated=True,
        )
        return TimedRows(rows, (np.arange(num_first) * (spread_s * NS_PER_S / num_first)).astype(np.int64), num_first)


def _strata(number: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """float64[number] in 0 .. 1, one in each of equal strata, ascending."""
    found: NDArray[np.float64] = (np.arange(number) + rng.random(number)) / number
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanQuestion:
    """A network, GPUs, requests and objectives.

    Attributes:
        settings: settings as given.
        network, gpu: the network, and each GPU.
        within, across: links inside a machine and between machines.
        system: the server whose commands are printed.
        lengths: lengths of the requests.
        max_positions: tokens of the longest sequence for which the network was made. None means unknown.
        notes: what of --dataset-path is not in the lengths, in sentences.
        family, skew: family of the experts' popularity, and its exponent or rate.
        groups_experts: whether modes in lock-step compute the experts of a layer as one grouped product.
        launch_ahead: items with a device at once, in `async`.
    """

    settings: PlanSettings
    network: NetworkShape
    gpu: Gpu
    within: Link
    across: Link
    system: ServedSystem
    lengths: LengthSample
    max_positions: int | None = None
    notes: tuple[str, ...] = ()
    family: str
    skew: float
    groups_experts: bool = True
    launch_ahead: int = 2

    def popularity(self, seed: int) -> PopularityForm:
        """Popularity of the experts under a seed."""
        hot_ids = self.settings.traffic.hot_experts
        return PopularityForm(family=self.family, skew=self.skew, hot_ids=hot_ids, seed=seed)  # type: ignore[arg-type]

    @property
    def tokens_per_s_needed(self) -> float | None:
        """Output tokens a second that --request-rate asks for. None means as many as possible."""
        rate = self.settings.traffic.request_rate
        return None if rate is None else rate * self.lengths.mean_output


def make_question(settings: PlanSettings) -> PlanQuestion:
    """Look up all names.

    Raises:
        ConfigError: a name is unknown, a file cannot be read, or the network was made for shorter requests.
    """
    hardware, gpu = settings.hardware, gpu_named(settings.hardware.gpu)
    family, skew = _popularity(settings.traffic.popularity)
    lengths, notes = _lengths(settings.traffic)
    return PlanQuestion(
        settings=settings,
        network=read_network(settings.model),
        gpu=gpu,
        within=link_within(hardware.link_within, gpu),
        across=link_named(hardware.link_across),
        system=system_named(settings.serving.system, settings.serving.for_version),
        lengths=lengths,
        max_positions=checked_positions(settings.model, lengths.longest),
        notes=notes,
        family=family,
        skew=skew,
    )


def checked_positions(model: str, longest: int) -> int | None:
    """Return the tokens of the longest sequence for which a network was made. None means unknown.

    Raises:
        ConfigError: they are fewer than the longest request needs.
    """
    most = positions_of(model)
    if most is not None and longest > most:
        raise ConfigError(
            f"the longest request needs {longest:,} tokens, and {model} was made for {most:,} (max_position_embeddings"
            " of its config.json), beyond which servers refuse them: leave out longer requests"
        )
    return most


def _popularity(text: str) -> tuple[str, float]:
    family, _, number = text.partition(":")
    try:
        skew = float(number) if number else 0.0
    except ValueError:
        skew = -1.0
    is_uniform = family == "uniform" and not number
    if not is_uniform and (family not in {"zipf", "exponential"} or not number or not 0 <= skew < np.inf):
        raise ConfigError(f"--popularity {text!r} is unknown: give uniform, zipf:EXPONENT or exponential:RATE")
    return family, skew


def _lengths(traffic: TrafficSettings) -> tuple[LengthSample, tuple[str, ...]]:
    """Return the lengths of the requests, and notes on what of a trace is not in them."""
    if traffic.dataset_path is None:
        return LengthSample(np.array([traffic.isl], np.int64), np.array([traffic.osl], np.int64)), ()
    record = read_record(traffic.dataset_path)
    if record is not None:
        tokens = [(each.num_prompt_tokens, max(each.num_output_tokens, 1)) for each in record.requests]
        return LengthSample(*np.array(tokens, np.int64).T), (f"--dataset-path: {_LENGTHS_ALONE}",)
    rows = read_trace(traffic.dataset_path)
    if rows.texts is not None:
        raise ConfigError(f"--dataset-path {traffic.dataset_path} holds texts, whose tokens are unknown: give lengths")
    answered = (rows.num_output_tokens >= 1) & (rows.num_prompt_tokens >= 1)
    if not answered.any():
        raise ConfigError(f"--dataset-path {traffic.dataset_path} has no request with a prompt and an answer")
    notes = rows.notes
    if rows.timestamp_ns is not None or rows.hash_ids is not None:
        notes.append(_LENGTHS_ALONE)
    sample = LengthSample(rows.num_prompt_tokens[answered], rows.num_output_tokens[answered])
    return sample, tuple(f"--dataset-path: {note}" for note in notes)
