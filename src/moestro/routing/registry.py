"""Registry of routing policies: makes a policy from its text form, or from a score given as an expression.

The text is parsed, never evaluated. Its syntax tree is checked against a list of allowed nodes and compiled to
functions over columns, so that an expression can only compute a score.
"""

from __future__ import annotations

import ast
import logging
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec.structs import replace

from moestro.core.load_figures import ROUTED_FIGURES
from moestro.core.policy_registry import PolicyKind, errors_of
from moestro.core.request import Request, SamplingParams
from moestro.core.rng import Draws
from moestro.core.views import EngineTable
from moestro.errors import ConfigError
from moestro.routing.policy_contract import Choice, Needs, RouteEvent, RouteInputs, RoutePolicy, RouteView
from moestro.routing.scoring import (
    FIGURES_OF,
    HIT_INDICATORS,
    INDICATORS,
    REQUIRED_FIGURES,
    TRAIT_INDICATORS,
    Scored,
    Scores,
)

logger = logging.getLogger(__name__)


Term = Callable[[RouteView], Any]  # a column or a number

MAX_CHARS = 1000
_MAX_EXPONENT = 8  # columns are float64; a larger exponent is more likely a mistake

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: np.true_divide,
    ast.FloorDiv: np.floor_divide,
    ast.Mod: np.mod,
    ast.Pow: np.power,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: np.less,
    ast.LtE: np.less_equal,
    ast.Gt: np.greater,
    ast.GtE: np.greater_equal,
    ast.Eq: np.equal,
    ast.NotEq: np.not_equal,
}
# name -> (number of arguments, function). `where(condition, a, b)` takes a comparison.
_FUNCTIONS: dict[str, tuple[int, Callable[..., Any]]] = {
    "min": (2, np.minimum),
    "max": (2, np.maximum),
    "abs": (1, np.abs),
    "sqrt": (1, np.sqrt),
    "log": (1, np.log),
    "exp": (1, np.exp),
    "where": (3, np.where),
}


def expression_policy(text: str) -> Scored:
    """Make a policy that chooses the engine with the lowest value of `text`.

    Args:
        text: numbers, names of INDICATORS, + - * / // % **, comparisons, and min, max, abs, sqrt, log, exp, where.

    Raises:
        ConfigError: `text` is not such an expression; the message names the place.
    """
    score, names = parse_score(text)
    figures = {figure for name in names for figure in FIGURES_OF.get(name, ())}
    needs = Needs(
        hits=bool(names & HIT_INDICATORS),
        figures=tuple(sorted(figures)),
        otherwise="the router's own counts" if figures - REQUIRED_FIGURES else "",
        required=tuple(sorted(figures & REQUIRED_FIGURES)),
        speeds=bool(names & TRAIT_INDICATORS),
    )
    return Scored(score, text, needs)


def parse_score(text: str) -> tuple[Callable[[RouteView], Scores], set[str]]:
    """Compile `text` to a function of a view, and return it with the names of its indicators.

    Raises:
        ConfigError: as in `expression_policy`.
    """
    if len(text) > MAX_CHARS:
        raise ConfigError(f"--route-score has {len(text)} characters, at most {MAX_CHARS} are allowed")
    try:
        names: set[str] = set()
        term = _term(ast.parse(text.strip(), mode="eval").body, text, names)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        raise ConfigError(f"--route-score {text!r} is not an expression: {error}") from error
    if not names:
        raise ConfigError(f"--route-score {text!r} is the same for all engines; indicators: {', '.join(INDICATORS)}")

    def score(view: RouteView) -> Scores:
        with np.errstate(all="ignore"):  # `choose` ranks NaN scores last
            return np.asarray(term(view), np.float64)

    return score, names


def _term(node: ast.expr, text: str, names: set[str]) -> Term:
    """Compile `node` to a function of a view, and add the names of its indicators to `names`."""
    parts = _operation(node, text)
    if parts is not None:
        function, arguments = parts
        return _apply(function, [_term(each, text, names) for each in arguments])
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            number = float(value)
            return lambda view: number
        case ast.Name(id=name) if name in INDICATORS:
            names.add(name)
            return INDICATORS[name]
        case ast.Name(id=name):
            raise _error(node, text, f"{name!r} is not an indicator; known: {', '.join(INDICATORS)}")
        case _:
            allowed = f"numbers, + - * / // % **, comparisons, {', '.join(_FUNCTIONS)}, indicators"
            raise _error(node, text, f"allowed are {allowed}")


def _operation(node: ast.expr, text: str) -> tuple[Callable[..., Any], list[ast.expr]] | None:
    """Return the function and operands of `node`, or None for a leaf or a node that is not allowed."""
    match node:
        case ast.BinOp(op=ast.Pow(), right=ast.Constant(value=int() | float() as power)) if abs(power) > _MAX_EXPONENT:
            raise _error(node, text, f"the exponent {power} is beyond {_MAX_EXPONENT}")
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)], [left, right]
        case ast.UnaryOp(op=unary, operand=operand) if type(unary) in _UNARY:
            return _UNARY[type(unary)], [operand]
        case ast.Compare(left=left, ops=[compare], comparators=[right]) if type(compare) in _COMPARE:
            return _COMPARE[type(compare)], [left, right]
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            num_args, function = _FUNCTIONS[name]
            if len(args) != num_args:
                raise _error(node, text, f"{name} takes {num_args} arguments, got {len(args)}")
            return function, args
        case _:
            return None


def _apply(function: Callable[..., Any], terms: list[Term]) -> Term:
    match terms:
        case [one]:
            return lambda view: function(one(view))
        case [one, two]:
            return lambda view: function(one(view), two(view))
        case _:
            return lambda view: function(*(term(view) for term in terms))


def _error(node: ast.expr, text: str, problem: str) -> ConfigError:
    source = ast.get_source_segment(text.strip(), node) or text
    return ConfigError(f"--route-score {text!r}: at {source!r}: {problem}")


_ANYTHING = Needs(hits=True, figures=ROUTED_FIGURES, otherwise="what the file does")


ANY_INPUTS = RouteInputs()


def policy_from(text: str, score: str | None = None, inputs: RouteInputs = ANY_INPUTS) -> RoutePolicy:
    """Make the policy that an operator named. Servers, routers and simulations all make theirs here.

    Args:
        text: a name in ROUTE_POLICIES with optional settings (`bailian:hit_weight=0.55`), or `FILE.py:NAME`.
        score: an expression over indicators, which replaces `text`.
        inputs: what the router's owner can supply.

    Raises:
        ConfigError: no such policy exists, it does not accept these settings, or it requires what cannot be supplied.
    """
    if score is None:
        policy = ROUTE_POLICIES.make(text, predict_ttft_ns=inputs.predict_ttft_ns)
    else:
        policy = expression_policy(score)
    if lacking := inputs.lacking(policy.needs):
        flag = f"--route-policy {text}" if score is None else f"--route-score {score!r}"
        raise ConfigError(
            f"{flag} requires {' and '.join(lacking)}, which no engine can report here."
            f" {inputs.remedy or 'Choose another policy.'}"
        )
    return policy


def _try_once(policy: RoutePolicy) -> None:
    """Let a policy decide between two engines without reports, to find errors before serving.

    Raises:
        ConfigError: the answer is no choice. Exceptions of the policy itself propagate.
    """
    request = Request(request_id="trial", num_prompt_tokens=1, sampling=SamplingParams(), arrival_ns=0)
    view = RouteView(request, EngineTable.blank(2), np.zeros(2), 16, 0, 0)
    _checked_choice(policy.decide(view, Draws(0, 0)), view)


def _checked_choice(choice: object, view: RouteView) -> Choice:
    """Return the answer of `decide` with numbers of Python and arrays where the contract has them.

    Raises:
        ConfigError: the answer breaks the contract.
    """
    num_engines = len(view.engines)
    if not isinstance(choice, Choice):
        raise ConfigError(f"it answered {choice!r} in place of a Choice")
    engine, reason = choice.engine, choice.reason
    if not isinstance(engine, int | np.integer) or not 0 <= engine < num_engines:
        raise ConfigError(f"it chose engine {engine!r} of {num_engines}; engine must be a whole number from 0")
    if not view.engines.routable[engine]:
        raise ConfigError(f"it chose engine {engine}, which is not routable")
    if not isinstance(reason, str):
        raise ConfigError(f"the reason of its choice must be a text, got {reason!r}")
    if not isinstance(choice.score, int | float | np.integer | np.floating):
        raise ConfigError(f"the score of its choice must be a number, got {choice.score!r}")
    scores = None if choice.scores is None else _one_each(choice.scores, num_engines)
    return replace(choice, engine=int(engine), score=float(choice.score), scores=scores)


def _one_each(scores: object, num_engines: int) -> Scores:
    """Return scores as an array.

    Raises:
        ConfigError: they are not one number per engine.
    """
    column = np.asarray(scores, np.float64)
    if column.shape != (num_engines,):
        raise ConfigError(f"it returned shape {column.shape} for {num_engines} engines")
    return column


def _check_contract(policy: Any) -> None:
    """Check what a user's policy states beside its decisions.

    Raises:
        ConfigError: `observe` is missing, or `needs` names no sources that a router knows.
    """
    if not callable(getattr(policy, "observe", None)):
        raise ConfigError("it has no method observe(event); one without state has a method that does nothing")
    needs = getattr(policy, "needs", None)
    if not isinstance(needs, Needs):
        raise ConfigError(f"its attribute needs must be a Needs of moestro.routing.policy_contract, got {needs!r}")
    unknown = sorted({*needs.figures, *needs.required} - {*ROUTED_FIGURES})
    if unknown:
        raise ConfigError(f"its needs name no figure {', '.join(unknown)}; known: {', '.join(ROUTED_FIGURES)}")


def _adapt(found: Any, text: str) -> RoutePolicy:
    """Make a policy of an object in a user's file.

    An object with `decide` is a `RoutePolicy`. A function is a score: it takes a `RouteView` and returns float64[n],
    lower is better. Exceptions of `observe` are logged; those of `decide` reach the caller, with the policy's name.
    """
    named = f"{ROUTE_POLICIES.flag} {text}"
    if hasattr(found, "decide"):
        _check_contract(found)
        return _Guarded(found, named)
    return Scored(_checked(found, named), text.partition(":")[2], _ANYTHING)


class _Guarded:
    """A policy of a user's file, whose choices are checked, and whose errors in `observe` are only logged.

    Observed events have already happened, and the router serves their requests and engines in any case.
    """

    def __init__(self, policy: RoutePolicy, text: str) -> None:
        self._policy = policy
        self._text = text

    @property
    def needs(self) -> Needs:
        """Inputs that the user's policy reads."""
        return self._policy.needs

    def decide(self, view: RouteView, draws: Draws) -> Choice:
        """Let the user's policy choose. Its errors, and an answer that is no choice, are ConfigErrors."""
        with errors_of(self._text):
            return _checked_choice(self._policy.decide(view, draws), view)

    def observe(self, event: RouteEvent) -> None:
        """Pass the event to the user's policy, and log its exceptions."""
        try:
            self._policy.observe(event)
        except Exception:
            logger.exception("%s: observe failed on %s", self._text, type(event).__name__)


def _checked(score: Callable[[RouteView], Any], text: str) -> Callable[[RouteView], Scores]:
    """Wrap `score` so that its errors, and a result other than one number per engine, are ConfigErrors."""

    def checked(view: RouteView) -> Scores:
        with errors_of(text):
            return _one_each(score(view), len(view.engines))

    return checked


ROUTE_POLICIES: PolicyKind[RoutePolicy] = PolicyKind(
    "route policy",
    "--route-policy",
    "moestro.routing.policies",
    try_once=_try_once,
    facts={"needs": lambda policy: policy.needs.in_words()},
    adapt=_adapt,
    offered=("predict_ttft_ns",),
)
