"""`moestro replay`: are the decisions of a record made again as they were?"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape

from moestro.errors import ConfigError
from moestro.routing.decision_record import Decision, Submitted
from moestro.routing.replay import replay


def replay_record(record: Path, console: Console) -> bool:
    """Make every decision of a `moestro route --record` again, and print how many came out as they were, the first that
    did not, and what the scores said against the choices.

    Returns:
        Whether all came out as they were.

    Raises:
        ConfigError: it is no record, or has no decision.
    """
    num_decisions = num_equal = 0
    regrets: list[float] = []
    first: tuple[Submitted, Submitted] | None = None
    try:
        with record.open("rb") as lines:
            for was, again in replay(lines):
                num_decisions += 1
                if was == again:
                    num_equal += 1
                elif first is None:
                    first = was, again
                if was.decision is not None and was.decision.regret is not None:
                    regrets.append(was.decision.regret)
    except OSError as error:
        raise ConfigError(f"{record} cannot be read: {error.strerror}") from None
    if not num_decisions:
        raise ConfigError(f"{record} has no decision in it")
    console.print(f"{num_equal:,} of {num_decisions:,} decisions came out as they were")
    if first is not None:
        was, again = first
        console.print(f"the first that did not: request [bold]{escape(was.request.request_id)}[/bold]")
        console.print(f"  was: {_told(was)}")
        console.print(f"  is:  {_told(again)}")
    _tell_regrets(regrets, console)
    return num_equal == num_decisions


def _tell_regrets(regrets: list[float], console: Console) -> None:
    passed_over = [regret for regret in regrets if regret > 0]
    if passed_over:
        console.print(
            f"{len(passed_over):,} of {len(regrets):,} passed over an engine that scored better,"
            f" by {max(passed_over):,.6g} at most"
        )
    elif regrets:
        console.print(f"none of {len(regrets):,} passed over an engine that scored better")


def _told(entry: Submitted) -> str:
    decision = entry.decision
    return f"refused ({entry.refusal})" if decision is None else _decision_told(decision)


def _decision_told(decision: Decision) -> str:
    scores = ", ".join(
        f"{each.engine}: {'none' if each.score is None else f'{each.score:,.9g}'}" for each in decision.candidates
    )
    return escape(f"engine {decision.engine}, {decision.reason}; {decision.hit_tokens:,} hit tokens; scores {scores}")
