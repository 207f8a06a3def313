"""One settings tree: a setting is one field in one place, whatever fills it."""

from __future__ import annotations

import inspect
import typing
from collections import Counter
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from moestro.cli import main
from moestro.config.config_sources import settings_in
from moestro.config.serve_settings import ServeSettings, with_derived
from moestro.core.setting_checks import CheckedSettings
from moestro.engine.settings import SchedulerLimits, SchedulerOptions, SchedulerPolicies, SchedulerSettings
from moestro.errors import ConfigError
from moestro.flow.settings import PreemptionSettings, SteppingSettings
from moestro.gateway.settings import RouteSettings
from moestro.loadgen.settings import BenchSettings
from moestro.model.settings import CacheSettings, ModelSettings
from moestro.sim.settings import PolicySettings, SimEngineSettings

# The simulated engines have other defaults for these than a server.
OTHER_DEFAULTS = {"max_num_seqs", "max_num_queued_reqs"}


def declared(kind: type, seen: set[type]) -> list[str]:
    """Each name that `kind`, its bases and the groups in it declare as a field, as often as it is declared."""
    names = []
    for base in kind.__mro__:
        if not is_dataclass(base) or base in seen:
            continue
        seen.add(base)
        hints = typing.get_type_hints(base)
        for name in inspect.get_annotations(base):
            if is_dataclass(hints[name]):
                names += declared(hints[name], seen)
            elif typing.get_origin(hints[name]) is not typing.ClassVar:
                names.append(name)
    return names


@pytest.mark.parametrize("command", [ServeSettings, RouteSettings, BenchSettings])
def test_a_setting_of_a_command_is_declared_once(command):
    names = declared(command, set())
    assert len(names) > 20
    assert [name for name, times in Counter(names).items() if times > 1] == []


def test_every_declared_setting_can_be_set_and_is_printed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        main(["serve", "--print-config"])
    printed = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert sorted(printed) == sorted(declared(ServeSettings, set()))
    assert printed == [name for name, _ in settings_in(ServeSettings())]
    with pytest.raises(SystemExit):
        main(["serve", "--help-all"])
    flags = capsys.readouterr().out
    assert all(f"--{name.replace('_', '-')}" in flags for name in printed)


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (SchedulerSettings, SchedulerOptions),
        (SimEngineSettings, SchedulerLimits),
        (SimEngineSettings, CacheSettings),
        (PolicySettings, SchedulerPolicies),
        (PolicySettings, PreemptionSettings),
        (SteppingSettings, PreemptionSettings),
        (ModelSettings, CacheSettings),
    ],
)
def test_the_simulator_and_the_scheduler_have_the_server_s_fields_with_its_types_and_defaults(mine, theirs):
    assert issubclass(mine, theirs)
    own = {each.name: (each.type, each.default) for each in fields(mine)}
    for each in fields(theirs):
        if mine is not SimEngineSettings or each.name not in OTHER_DEFAULTS:
            assert own[each.name] == (each.type, each.default)
    redeclared = inspect.get_annotations(mine).keys() & {each.name for each in fields(theirs)}
    assert redeclared <= OTHER_DEFAULTS


def test_a_range_holds_where_only_the_default_is_declared_again():
    with pytest.raises(ConfigError, match=r"^\[engines\] max_num_seqs must be at least 1, got 0$"):
        SimEngineSettings(max_num_seqs=0)


@pytest.mark.parametrize("kind", [SchedulerLimits, SchedulerOptions])
def test_a_message_names_the_flag_or_the_key(kind):
    assert issubclass(kind, CheckedSettings)
    with pytest.raises(ConfigError, match=r"^--max-num-seqs must be at least 1, got 0$"):
        kind(max_num_seqs=0)
    with pytest.raises(ConfigError, match=r"^\[engines\] max_num_batched_tokens 5 must be at least"):
        SimEngineSettings(max_num_batched_tokens=5, max_num_seqs=6)


def test_what_follows_from_the_settings_is_worked_out_once(tmp_path):
    found = with_derived(ServeSettings(), lambda name: tmp_path / name, Path)
    assert found.model.model == str(tmp_path / "moestro-demo")
    assert found.server.served_model_name == ("moestro-demo",)
    assert found.paced is None
    paced = ServeSettings(model=ModelSettings("mixtral-8x7b", device="paced:h20"))
    found = with_derived(paced, lambda name: tmp_path / name, Path)
    assert found.paced is not None
    assert (found.paced.device, found.paced.network) == ("paced:h20", "mixtral-8x7b")
    assert (found.model.model, found.model.device) == (str(tmp_path / "moestro-demo"), "cpu")
    assert found.server.served_model_name == ("mixtral-8x7b",)


@pytest.mark.parametrize(("command", "settings"), [("serve", ServeSettings()), ("route", RouteSettings())])
def test_every_flag_with_a_default_can_be_given_with_it(capsys, command, settings):
    given = [(name, value) for name, value in settings_in(settings) if type(value) in {str, int, float}]
    assert len(given) > 20
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given]
    with pytest.raises(SystemExit) as caught:
        main([command, *flags, "--print-config"])
    assert caught.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.endswith("# command line") for line in lines) == len(given)
