"""`moestro replay`: checks whether a record's decisions are reproduced."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape

from moestro.errors import ConfigError
from moestro.routing.decision_record import Decision, Submitted
from moestro.routing.replay import replay


def replay_record(record: Path, console: Console) -> bool:
    """Replay every decision of a `moestro route --record`, and print how many are reproduced.

    The output also shows the first difference, and how often another engine had a better score.

    Returns:
        Whether all decisions are reproduced.

    Raises:
        ConfigError: the file is no record, or contains no decision.
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
        raise ConfigError(f"{record} contains no decision")
    console.print(f"{num_equal:,} of {num_decisions:,} decisions are reproduced")
    if first is not None:
        was, again = first
        console.print(f"first difference: request [bold]{escape(was.request.request_id)}[/bold]")
        console.print(f"  recorded: {_told(was)}")
        console.print(f"  replayed: {_told(again)}")
    _tell_regrets(regrets, console)
    return num_equal == num_decisions


def _tell_regrets(regrets: list[float], console: Console) -> None:
    passed_over = [regret for regret in regrets if regret > 0]
    if passed_over:
        console.print(
            f"{len(passed_over):,} of {len(regrets):,} decisions ignored an engine with a better score,"
            f" by {max(passed_over):,.6g} at most"
        )
    elif regrets:
        console.print(f"none of {len(regrets):,} decisions ignored an engine with a better score")


def _told(entry: Submitted) -> str:
    decision = entry.decision
    return f"refused ({entry.refusal})" if decision is None else _decision_told(decision)


def _decision_told(decision: Decision) -> str:
    scores = ", ".join(
        f"{each.engine}: {'none' if each.score is None else f'{each.score:,.9g}'}" for each in decision.candidates
    )
    return escape(f"engine {decision.engine}, {decision.reason}; {decision.hit_tokens:,} hit tokens; scores {scores}")
