"""Scores given as text: arithmetic over the indicators, for example `p_tokens * batch_size`.

The text is parsed, never evaluated. Its syntax tree is checked against a list of allowed nodes and compiled to
functions over columns, so that an expression can only compute a score.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from moestro.errors import ConfigError
from moestro.routing.indicators import FIGURES_OF, HIT_INDICATORS, INDICATORS, REQUIRED_FIGURES, TRAIT_INDICATORS
from moestro.routing.policy_contract import Needs, RouteView
from moestro.routing.scoring import Scored, Scores

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
