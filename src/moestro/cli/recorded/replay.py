"""`moestro replay`: checks whether a record's decisions are reproduced."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moestro.engine.event_recorder import DecisionReplay, ReplayedDecision
from moestro.errors import ConfigError
from moestro.files.text_files import open_utf8
from moestro.routing.decision_record import (
    Decision,
    Gap,
    Head,
    PolicyText,
    ScheduledOn,
    Submitted,
    decode_entry,
    is_entry,
    replay,
)
from moestro.routing.policy_contract import unnamed_note
from moestro.routing.registry import policy_from

_HEAD = b'{"type":"Head"'


def replay_records(records: Sequence[Path], console: Console) -> bool:
    """Replay every decision of each `--record` of `moestro route` or `moestro serve`, and print how many are equal.

    A router's record has what its peers sent, so the records of several routers are replayed one by one.

    The output also shows the first difference, and how often another engine had a better score.
    Of `moestro serve`, the order of waiting requests and the victims of preemptions are replayed too.

    Returns:
        Whether all decisions are reproduced.

    Raises:
        ConfigError: a file is no record, or contains no decision.
    """
    routed, scheduled, regrets = _NOTHING, _NOTHING, list[float]()
    for record in records:
        of_router, of_schedulers = _compared(record, regrets)
        routed, scheduled = _added(routed, of_router), _added(scheduled, of_schedulers)
    is_equal = _tell("decisions", routed, console)
    _tell_regrets(regrets, console)
    if scheduled[0]:
        is_equal &= _tell("decisions of schedulers (order of the queue, victims of preemption)", scheduled, console)
    return is_equal


# Number of decisions, of equal ones, and the first that differs.
_Comparison = tuple[int, int, ReplayedDecision | None]
_NOTHING: _Comparison = (0, 0, None)


def _compared(record: Path, regrets: list[float]) -> tuple[_Comparison, _Comparison]:
    """Return the comparisons of routing and scheduling decisions of one record."""
    try:
        with open_utf8(record) as lines:
            routed = _compare(_routing_decisions(lines, regrets))
        with open_utf8(record) as lines:
            scheduled = _compare(_scheduling_decisions(lines))
    except OSError as error:
        raise ConfigError(f"{record} cannot be read: {error.strerror}") from None
    if not routed[0] and not scheduled[0]:
        raise ConfigError(f"{record} contains no decision")
    return routed, scheduled


def _added(one: _Comparison, other: _Comparison) -> _Comparison:
    return one[0] + other[0], one[1] + other[1], one[2] or other[2]


def _compare(decisions: Iterator[ReplayedDecision]) -> _Comparison:
    num = num_equal = 0
    first: ReplayedDecision | None = None
    for decision in decisions:
        num += 1
        if decision.recorded == decision.replayed:
            num_equal += 1
        elif first is None:
            first = decision
    return num, num_equal, first


def _routing_decisions(lines: Iterator[bytes], regrets: list[float]) -> Iterator[ReplayedDecision]:
    for was, again in replay(lines):
        recorded = describe_decision(was)
        # The text rounds; entries are compared as a whole.
        text = describe_decision(again)
        replayed = recorded if was == again else text + ("" if text != recorded else " (in details)")
        yield ReplayedDecision(was.request.request_id, recorded, replayed)
        if was.decision is not None and was.decision.regret is not None:
            regrets.append(was.decision.regret)


def _scheduling_decisions(lines: Iterator[bytes]) -> Iterator[ReplayedDecision]:
    engines: dict[int, DecisionReplay] = {}
    is_behind_gap = False
    for line in lines:
        if not line.strip():
            continue
        with contextlib.suppress(msgspec.MsgspecError):  # the end of a killed server; the routing replay judges damage
            entry = decode_entry(line) if is_entry(line) else None
            if isinstance(entry, Head | Gap):
                engines, is_behind_gap = {}, isinstance(entry, Gap)
            if isinstance(entry, ScheduledOn) and not is_behind_gap:
                decision = engines.setdefault(entry.engine, DecisionReplay()).take(entry.event)
                if decision is not None:
                    yield decision


def _tell(what: str, comparison: _Comparison, console: Console) -> bool:
    num, num_equal, first = comparison
    console.print(f"{num_equal:,} of {num:,} {what} are reproduced")
    if first is not None:
        console.print(f"first difference: request [bold]{escape(first.request_id)}[/bold]")
        console.print(f"  recorded: {escape(first.recorded)}")
        console.print(f"  replayed: {escape(first.replayed)}")
    return num == num_equal


def _tell_regrets(regrets: list[float], console: Console) -> None:
    passed_over = [regret for regret in regrets if regret > 0]
    if passed_over:
        console.print(
            f"{len(passed_over):,} of {len(regrets):,} decisions ignored an engine with a better score,"
            f" by {max(passed_over):,.6g} at most"
        )
    elif regrets:
        console.print(f"none of {len(regrets):,} decisions ignored an engine with a better score")


def recorded_policy_of(record: Path) -> str:
    """Return the policy of a record's first part.

    Raises:
        ConfigError: the file cannot be read, or is no record of decisions.
    """
    try:
        with open_utf8(record) as lines:
            for line in lines:
                if line.startswith(_HEAD):
                    head = decode_entry(line)
                    assert isinstance(head, Head), "its tag says so"
                    return head.score or head.policy
    except OSError as error:
        raise ConfigError(f"{record} cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{record} is no record: {error}") from None
    raise ConfigError(f"{record} contains no decision: give a file of --record of moestro serve or route")


def describe_decision(entry: Submitted) -> str:
    """Describe a decision or a refusal in one line."""
    decision = entry.decision
    return f"refused ({entry.refusal})" if decision is None else _decision_text(decision)


def _decision_text(decision: Decision) -> str:
    scores = ", ".join(
        f"{each.engine}: {'none' if each.score is None else f'{each.score:,.9g}'}" for each in decision.candidates
    )
    return f"engine {decision.engine}, {decision.reason}; {decision.hit_tokens:,} hit tokens; scores {scores}"


# `moestro replay --policy`: decides the requests of a record by another policy, and says what changes.


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
