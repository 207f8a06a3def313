"""`moestro replay --policy`: decides the requests of a record by another policy, and says what changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moestro.cli.recorded.replay import describe_decision, recorded_policy_of
from moestro.errors import ConfigError
from moestro.files.text_files import open_utf8
from moestro.routing.record.decision_record import PolicyText, Submitted
from moestro.routing.record.replay import replay
from moestro.routing.registry import policy_from
from moestro.routing.request_names import unnamed_note


@dataclass(slots=True)
class DecidedSums:
    """What one policy decided: requests and prompt tokens by engine, predicted hits, and refusals."""

    requests: Counter[int] = field(default_factory=Counter)
    tokens: Counter[int] = field(default_factory=Counter)
    num_hit_tokens: int = 0
    num_refused: int = 0

    def take(self, entry: Submitted) -> None:
        """Count a decision."""
        if entry.decision is None:
            self.num_refused += 1
            return
        self.requests[entry.decision.engine] += 1
        self.tokens[entry.decision.engine] += entry.request.num_prompt_tokens
        self.num_hit_tokens += entry.decision.hit_tokens

    @property
    def hit_ratio(self) -> float:
        """Share of the prompt tokens that was expected in the chosen engines' caches."""
        return self.num_hit_tokens / max(self.tokens.total(), 1)

    def imbalance(self, num_engines: int) -> float:
        """Most over mean of the engines' prompt tokens."""
        return max(self.tokens.values(), default=0) * num_engines / max(self.tokens.total(), 1)


@dataclass(slots=True)
class Redecision:
    """Decisions of a record beside those of another policy.

    Attributes:
        num: number of decisions and refusals.
        num_moved: how many of them differ in the engine.
        first: first decision that differs, as recorded and as made again.
        was, now: sums of both policies.
        named: whether each request names its session and its user.
    """

    num: int = 0
    num_moved: int = 0
    first: tuple[Submitted, Submitted] | None = None
    was: DecidedSums = field(default_factory=DecidedSums)
    now: DecidedSums = field(default_factory=DecidedSums)
    named: dict[str, list[bool]] = field(default_factory=lambda: {"session_id": [], "user": []})

    @property
    def num_engines(self) -> int:
        """Number of engines that either policy chose."""
        return len(self.was.requests.keys() | self.now.requests.keys())


def redecide(lines: Iterable[bytes], policy: PolicyText, found: Redecision | None = None) -> Redecision:
    """Decide every request of a record by another policy.

    Args:
        found: sums of other routers' records, to which those of this one are added.

    Raises:
        ConfigError: the record cannot be replayed, contains no decision, or the policy cannot be made.
    """
    found = found or Redecision()
    num_before = found.num
    for entry, again in replay(lines, policy):
        found.num += 1
        found.was.take(entry)
        found.now.take(again)
        for name, values in found.named.items():
            values.append(getattr(entry.request, name) is not None)
        before, after = (None if each.decision is None else each.decision.engine for each in (entry, again))
        if before != after:
            found.num_moved += 1
            found.first = found.first or (entry, again)
    if found.num == num_before:
        raise ConfigError("the record contains no decision")
    return found


def print_redecisions(records: Sequence[Path], policies: Iterable[str], console: Console) -> None:
    """Print what each of `policies` changes in records of `moestro route` or `moestro serve`.

    Of several routers, each decides again on what it knew: the others' requests are where they were.

    Raises:
        ConfigError: a file is no record, or a policy cannot be made.
    """
    own = " and ".join(dict.fromkeys(recorded_policy_of(record) for record in records))
    for name in policies:
        policy = policy_from(name)
        found = Redecision()
        for record in records:
            try:
                with open_utf8(record) as lines:
                    redecide(lines, PolicyText(name), found)
            except OSError as error:
                raise ConfigError(f"{record} cannot be read: {error.strerror}") from None
        console.print(
            f"Under {name}, {found.num_moved:,} of {found.num:,} decisions ({found.num_moved / found.num:.1%}) choose"
            f" another engine than under {own}",
            markup=False,
            highlight=False,
        )
        console.print(_table(found, own, name))
        if found.first is not None:
            entry, again = found.first
            console.print(f"first difference: request [bold]{escape(entry.request.request_id)}[/bold]")
            console.print(f"  recorded: {escape(describe_decision(entry))}")
            console.print(f"  {escape(name)}: {escape(describe_decision(again))}")
        note = unnamed_note(name, policy, {key: np.array(values) for key, values in found.named.items()})
        if note is not None:
            console.print(f"note: {note}", markup=False, highlight=False)
    console.print(
        "Requests begin and end, and engines report, as recorded: moestro sim --replay simulates what a policy does to"
        " latencies.",
        markup=False,
        highlight=False,
    )


def _table(found: Redecision, own: str, name: str) -> Table:
    table = Table("", own, name)
    for column in table.columns[1:]:
        column.justify = "right"
    sides = (found.was, found.now)
    for engine in sorted(found.was.requests.keys() | found.now.requests.keys()):
        table.add_row(f"requests to engine {engine}", *(f"{side.requests[engine]:,}" for side in sides))
    table.add_row("refused", *(f"{side.num_refused:,}" for side in sides))
    table.add_row("imbalance of prompt tokens", *(f"{side.imbalance(found.num_engines):.3f}" for side in sides))
    # A router whose policy does not read hits keeps no index, and expects none.
    table.add_row("expected hit ratio", *(f"{side.hit_ratio:.4f}" if side.num_hit_tokens else "-" for side in sides))
    return table
