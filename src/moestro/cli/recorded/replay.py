"""`moestro replay`: checks whether a record's decisions are reproduced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape

from moestro.engine.decision_replay import DecisionReplay, ReplayedDecision
from moestro.errors import ConfigError
from moestro.files.text_files import open_utf8
from moestro.routing.record.decision_record import Decision, Gap, Head, ScheduledOn, Submitted, decode_entry, is_entry
from moestro.routing.record.replay import replay

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
