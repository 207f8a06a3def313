"""Registers the policies of each kind by name, and makes one from the text `NAME:SETTING=VALUE,...` of an operator."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import pkgutil
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from moestro.errors import ConfigError

PolicyT = TypeVar("PolicyT")
Maker = Callable[..., PolicyT]
Setting = int | float | str

# (flag, file, name) -> the function, class or object that the user's file calls `name`.
ReadUserCode = Callable[[str, Path, str], object]


@dataclass(frozen=True, slots=True)
class PolicyEntry(Generic[PolicyT]):
    """One registered policy.

    Attributes:
        make: class or function that makes the policy. The settings are its arguments whose default is a number or a
            word.
        description: one sentence of what the policy does.
        source: paper with section or equation, or system with version.
        defined_in: module and name of the class or function that was decorated.
    """

    make: Maker[PolicyT]
    description: str
    source: str
    defined_in: str


@dataclass(eq=False)
class PolicyKind(Generic[PolicyT]):
    """All policies of one kind. Modules of `package` register them with a decorator.

    Attributes:
        name: name of the kind in messages, "route policy".
        flag: command-line flag that takes a policy of this kind.
        package: package whose modules hold the policies. They are imported when the kind first makes one, so a
            new policy needs no other file than its own.
        try_once: makes one decision with a new policy, so that a mistake shows before anything is served. None means no
            trial.
        facts: columns of the table that each policy states about itself: heading, and words from a policy.
        adapt: makes a policy of what a user's file defines; the second argument is the text `FILE.py:NAME`. None means
            that this kind takes no user's file.
        offered: arguments that the program passes to every policy that has them. They are no settings.
        read_user_code: reads a user's file. None means that this process accepts none.
    """

    read_user_code: ClassVar[ReadUserCode | None] = None

    name: str
    flag: str
    package: str
    _: KW_ONLY
    try_once: Callable[[PolicyT], None] | None = None
    facts: Mapping[str, Callable[[PolicyT], str]] = field(default_factory=dict)
    adapt: Callable[[Any, str], PolicyT] | None = None
    offered: tuple[str, ...] = ()
    _entries: dict[str, PolicyEntry[PolicyT]] = field(default_factory=dict, init=False)
    _is_complete: bool = field(default=False, init=False)

    def register(self, name: str, description: str, *, source: str) -> Callable[[Maker[PolicyT]], Maker[PolicyT]]:
        """Decorate a class, of which each use of the policy gets a new object."""

        def registered(make: Maker[PolicyT]) -> Maker[PolicyT]:
            self._add(name, PolicyEntry(make, description, source, _definition(make)))
            return make

        return registered

    def register_function(self, name: str, description: str, *, source: str) -> Callable[[PolicyT], PolicyT]:
        """Decorate a function that is the policy itself and has no state."""

        def registered(policy: PolicyT) -> PolicyT:
            self._add(name, PolicyEntry(lambda: policy, description, source, _definition(policy)))
            return policy

        return registered

    def entries(self) -> Mapping[str, PolicyEntry[PolicyT]]:
        """Every registered policy by name, in alphabetical order."""
        if not self._is_complete:
            package = importlib.import_module(self.package)
            for module in pkgutil.walk_packages(package.__path__, f"{self.package}."):
                importlib.import_module(module.name)
            self._entries = dict(sorted(self._entries.items()))
            self._is_complete = True
        return self._entries

    def names(self) -> tuple[str, ...]:
        """Names of all registered policies."""
        return tuple(self.entries())

    def make(self, text: str, **offered: object) -> PolicyT:
        """The policy that an operator named.

        Args:
            text: `NAME`, `NAME:SETTING=VALUE,...`, or `FILE.py:NAME` where the kind takes a user's file.
            offered: values of the kind's `offered` arguments.

        Raises:
            ConfigError: no policy, or no setting of it, has that name; a value is not allowed; or the trial fails.
        """
        if text.partition(":")[0].endswith(".py"):
            if self.adapt is None:
                raise ConfigError(
                    f"{self.flag} {text}: it takes no policy from a file; known: {', '.join(self.names())}"
                )
            return self._make_from_file(text, self.adapt)
        name, settings = parse_policy(self.name, text)
        entry = self.entries().get(name)
        if entry is None:
            files = ", or FILE.py:NAME" if self.adapt is not None else ""
            raise ConfigError(f"unknown {self.name} {name!r}; known: {', '.join(self.names())}{files}")
        self._check_settings(name, entry, settings)
        given = {key: value for key, value in offered.items() if key in _parameters(entry.make)}
        try:
            policy, tried = entry.make(**settings, **given), entry.make(**settings, **given)
        except (ConfigError, TypeError, ValueError, ArithmeticError) as error:  # the last two: a number is out of range
            raise ConfigError(f"{self.name} {name!r}: {error}") from None
        try:
            self._try(tried)  # a second object, because a policy may have a history, which starts empty
        except Exception as error:
            raise ConfigError(f"{self.name} {name!r} cannot decide with {settings}: {error}") from error
        return policy

    def help_text(self) -> str:
        """One line for each policy with its settings, as a Markdown list for `--help`."""
        return "\n\n".join(
            f"* {name}: {entry.description}{self._settings_in_words(entry)}{self._needs_in_words(entry)}"
            for name, entry in self.entries().items()
        )

    def table(self) -> str:
        """A Markdown table of all policies: name, what it does, settings (if any has one), facts, source."""
        settings = {
            name: ", ".join(f"`{setting}`" for setting in self._written_settings(entry))
            for name, entry in self.entries().items()
        }
        has_settings = any(settings.values())
        heads = ["name", "what it does", *["settings"] * has_settings, *self.facts, "source"]
        rows = [heads, ["---"] * len(heads)]
        for name, entry in self.entries().items():
            facts = [words(entry.make()) for words in self.facts.values()]
            own = [settings[name] or "none"] * has_settings
            rows.append([f"`{name}`", entry.description, *own, *facts, entry.source])
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)

    def _add(self, name: str, entry: PolicyEntry[PolicyT]) -> None:
        """Add `entry`. The same definition may come again, because a user's file runs at each use."""
        old = self._entries.get(name)
        if old is not None and old.defined_in != entry.defined_in:
            raise ValueError(f"two policies are registered as {self.name} {name!r}")
        self._entries[name] = entry

    def _try(self, policy: PolicyT) -> None:
        if self.try_once is not None:
            self.try_once(policy)

    def _make_from_file(self, text: str, adapt: Callable[[Any, str], PolicyT]) -> PolicyT:
        """The policy of a user's file. A class in it is made without arguments."""
        read = PolicyKind.read_user_code
        if read is None:
            raise ConfigError(f"{self.flag} {text}: this process reads no users' files")
        file, _, name = text.partition(":")
        found = read(self.flag, Path(file), name)
        try:
            policy = adapt(found() if isinstance(found, type) else found, text)
            self._try(policy)
        except Exception as error:
            cause = _cause(error).removeprefix(f"{self.flag} {text}: ")
            raise ConfigError(f"{self.flag} {text} failed its trial: {cause}") from error
        return policy

    def _settings(self, entry: PolicyEntry[PolicyT]) -> dict[str, Setting]:
        """Settings and their defaults."""
        return {
            each.name: each.default
            for each in _parameters(entry.make).values()
            if isinstance(each.default, int | float | str) and each.name not in self.offered
        }

    def _written_settings(self, entry: PolicyEntry[PolicyT]) -> list[str]:
        """Settings with their defaults, as an operator writes them."""
        return [
            f"{name}={f'{default:g}' if isinstance(default, float) else default}"
            for name, default in self._settings(entry).items()
        ]

    def _settings_in_words(self, entry: PolicyEntry[PolicyT]) -> str:
        written = self._written_settings(entry)
        return f" Settings: {', '.join(written)}." if written else ""

    def _needs_in_words(self, entry: PolicyEntry[PolicyT]) -> str:
        """Sentence about what the policy needs, where the kind has a column of that name."""
        words = self.facts["needs"](entry.make()) if "needs" in self.facts else "none"
        return "" if words == "none" else f" Needs: {words.replace('`', '')}."

    def _check_settings(self, name: str, entry: PolicyEntry[PolicyT], settings: Mapping[str, object]) -> None:
        defaults = self._settings(entry)
        takes_any = any(each.kind is each.VAR_KEYWORD for each in _parameters(entry.make).values())
        for setting, value in settings.items():
            if setting in defaults:
                wanted = _wanted_type(value, defaults[setting])
                if wanted:
                    raise ConfigError(f"{self.name} {name!r}: {setting} must be {wanted}, got {value!r}")
            elif not takes_any:
                raise ConfigError(
                    f"{self.name} {name!r} has no setting {setting!r}; it has {', '.join(defaults) or 'none at all'}"
                )


@contextlib.contextmanager
def errors_of(policy: str) -> Iterator[None]:
    """Raise each error of a user's policy as a ConfigError that names the policy, and the line that raised.

    Args:
        policy: flag and text that name the policy, for messages.
    """
    try:
        yield
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if isinstance(error, ConfigError) else f" ({Path(place.filename).name}, line {place.lineno})"
        raise ConfigError(f"{policy}: {_cause(error)}{where}") from error


def _cause(error: Exception) -> str:
    return str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"


def parse_policy(kind: str, text: str) -> tuple[str, dict[str, Setting]]:
    """Split `weighted_fair:output_cost=3,weight:ann=2` into ("weighted_fair", {"output_cost": 3, "weight:ann": 2}).

    Args:
        kind: name of the kind, for messages.

    Raises:
        ConfigError: a setting is not SETTING=VALUE, or is there twice.
    """
    name, _, rest = text.partition(":")
    settings: dict[str, Setting] = {}
    for each in filter(None, rest.split(",")):
        setting, _, value = (part.strip() for part in each.rpartition("="))
        if not setting or not value:
            raise ConfigError(f"{kind} {text!r}: settings are written NAME:SETTING=VALUE,..., got {each!r}")
        if setting in settings:
            raise ConfigError(f"{kind} {text!r} gives {setting} twice")
        settings[setting] = _number_or_word(value)
    return name, settings


def _number_or_word(text: str) -> Setting:
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        return text if isinstance(number, float) and math.isnan(number) else number
    return text


def _wanted_type(value: object, default: Setting) -> str | None:
    """The type that a setting must have, in words. None means that `value` has it."""
    if isinstance(default, str):
        return None if isinstance(value, str) else "a word"
    if isinstance(default, int):
        return None if isinstance(value, int) else "a whole number"
    return None if isinstance(value, int | float) else "a number"


@cache
def _parameters(make: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    """Arguments of a class or a function. Python takes a while to find them."""
    return inspect.signature(make).parameters


def _definition(decorated: object) -> str:
    """Module and name of a class or a function."""
    return f"{decorated.__module__}.{getattr(decorated, '__qualname__', '')}"
