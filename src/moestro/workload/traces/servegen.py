"""ServeGen's clients (arXiv 2505.09999): rates, burstiness and lengths by time of day, to draw requests from.

A file holds one client a line. `client` is its number. `trace` holds rows `[t, rate, cv, "Gamma" | "Weibull", shape,
scale]`, one for each 600 s in which the client sent requests. `dataset` maps a second of the day to `input_tokens` and
`output_tokens`, each `{"tokens": share}`, valid from that second on. The two lengths are drawn independently.
ServeGen's own script draws both from one number, which makes long answers follow long prompts by construction.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import NS_PER_S
from moestro.errors import ConfigError
from moestro.files.text_files import open_lines, read_jsonl
from moestro.workload.rows import Int64s, Rows

WINDOW_S = 600

_Positive = Annotated[float, msgspec.Meta(gt=0)]


class Window(msgspec.Struct, frozen=True, array_like=True):
    """A client's behaviour over WINDOW_S seconds."""

    start_s: int
    rate: _Positive  # requests a second
    cv: float  # of the gaps, as measured; requests are drawn from the fitted pattern
    pattern: Literal["Gamma", "Weibull"]
    shape: _Positive
    scale: float


class Histograms(msgspec.Struct, frozen=True):
    """Frequencies of lengths: tokens (as text) to share; empty where the client sent nothing."""

    input_tokens: dict[str, float]
    output_tokens: dict[str, float]


class ServeGenClient(msgspec.Struct, frozen=True):
    """One client. The keys of `dataset` are the second of the day from which an entry holds."""

    client: int
    trace: list[Window]
    dataset: dict[str, Histograms]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Which part of the day is drawn, and at which density.

    Attributes:
        start_s: second of the day at which the span begins.
        duration_s: length in seconds; whole windows of WINDOW_S are drawn and cut to it.
        factor: multiple of the requests that the clients sent.
    """

    start_s: int = 0
    duration_s: int = 3600
    factor: float = 1.0

    def __post_init__(self) -> None:
        if self.start_s < 0 or self.duration_s < 1 or not self.factor > 0:
            raise ConfigError(
                "a span of ServeGen's day begins at 0 s or later, lasts at least 1 s and has a factor above 0, got"
                f" {self.start_s} s, {self.duration_s} s, {self.factor:g}"
            )


def read_clients(path: Path) -> list[ServeGenClient]:
    """Read the clients of a file.

    Raises:
        ConfigError: the file has another form; the text names the file and the line.
    """
    with open_lines(path) as lines:
        clients = [_client(path, number, fields) for number, fields in read_jsonl(path, lines)]
    if not clients:
        raise ConfigError(f"{path} holds no clients")
    return clients


def draw_requests(clients: list[ServeGenClient], span: Span, seed: int) -> Rows:
    """Draw the requests of all clients in a span, in order of time, from 0; `user` is the client's number.

    In each window a client sends as many requests as it did, times the factor (a fractional rest by chance). The gaps
    follow its pattern and are scaled to the window.

    Raises:
        ConfigError: no client sends a request in the span.
    """
    parts = [part for client in clients for part in _draw_client(client, span, seed)]
    if not parts or not sum(len(times) for times, *_ in parts):
        raise ConfigError(
            f"no client sends requests from second {span.start_s} of the day for {span.duration_s} s: give another span"
        )
    times, inputs, outputs, users = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(times, kind="stable")
    return Rows(
        num_prompt_tokens=inputs[order],
        num_output_tokens=outputs[order],
        timestamp_ns=times[order] - times[order][0],
        user=users[order],
        is_generated=True,
    )


def _client(path: Path, number: int, fields: dict[str, Any]) -> ServeGenClient:
    try:
        return msgspec.convert(fields, ServeGenClient)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{path}, line {number}: {error}; expected a client of ServeGen: client, trace ([t, rate, cv, pattern,"
            " shape, scale]), dataset (input_tokens and output_tokens by second of the day)"
        ) from None


def _draw_client(client: ServeGenClient, span: Span, seed: int) -> list[tuple[Int64s, Int64s, Int64s, Int64s]]:
    """For each window of the span: times, prompt lengths, answer lengths, the client's number."""
    drawn = []
    for window in client.trace:
        histograms = _histograms(client, window.start_s)
        is_within = window.start_s + WINDOW_S > span.start_s and window.start_s < span.start_s + span.duration_s
        if not is_within or histograms is None:
            continue
        rng = np.random.default_rng([seed, client.client, window.start_s])
        times = window.start_s * NS_PER_S + _times(window, span.factor, rng)
        times = times[(times >= span.start_s * NS_PER_S) & (times < (span.start_s + span.duration_s) * NS_PER_S)]
        inputs = _draw(histograms.input_tokens, len(times), rng)
        outputs = _draw(histograms.output_tokens, len(times), rng)
        drawn.append((times, inputs, outputs, np.full(len(times), client.client)))
    return drawn


def _times(window: Window, factor: float, rng: np.random.Generator) -> Int64s:
    expected = window.rate * WINDOW_S * factor
    count = int(expected) + int(rng.random() < expected % 1)
    draw = rng.gamma if window.pattern == "Gamma" else rng.weibull
    gaps = draw(window.shape, size=count + 1)  # the last gap reaches to the end of the window
    since: NDArray[np.float64] = np.cumsum(gaps)
    times: Int64s = np.floor(since[:-1] / since[-1] * (WINDOW_S * NS_PER_S)).astype(np.int64)
    return times


def _histograms(client: ServeGenClient, at_s: int) -> Histograms | None:
    """Histograms valid at a time of day, or the nearest ones with any lengths; None if the client has none at all."""
    known = {int(start): each for start, each in client.dataset.items() if each.input_tokens and each.output_tokens}
    if not known:
        return None
    starts = sorted(known)
    return known[max((start for start in starts if start <= at_s), default=starts[0])]


def _draw(table: dict[str, float], size: int, rng: np.random.Generator) -> Int64s:
    lengths = np.array([int(tokens) for tokens in table], np.int64)
    shares = np.array(list(table.values()))
    drawn: Int64s = lengths[
        np.searchsorted(np.cumsum(shares / shares.sum()), rng.random(size)).clip(max=len(lengths) - 1)
    ]
    return np.maximum(drawn, 1)
