"""One kind of policies on its own: names, settings, arguments that the program offers, and what is refused."""

from __future__ import annotations

import pytest

from moestro.core.policy_registry import PolicyKind
from moestro.errors import ConfigError


class Greeting:
    """What every policy of the kind below can do."""

    def greet(self) -> str:
        return "hello"


def make_kind(**more) -> PolicyKind[Greeting]:
    """Two policies, which no package holds."""
    kind = PolicyKind("greeting", "--greeting", "moestro.flow.policies", **more)

    @kind.register("twice", "Says it again.", source="a paper, section 2")
    class Twice(Greeting):
        def __init__(self, *, times: int = 2, word: str = "hello", share: float = 0.5, after_ns: int = 0) -> None:
            if times < 0:
                raise ConfigError("times must not be negative")
            self.times, self.word, self.after_ns = times, word, after_ns

        def greet(self) -> str:
            return self.word * self.times

    @kind.register("plain", "Says it once.", source="common practice")
    class Plain(Greeting):
        pass

    return kind


def test_a_text_gives_name_and_settings():
    kind = make_kind()
    assert kind.names() == ("plain", "twice")
    assert kind.make("twice:times=3,word=ho").greet() == "hohoho"
    assert kind.make("twice") is not kind.make("twice"), "each use gets a new object"


def test_offered_arguments_go_to_policies_that_have_them_and_are_no_settings():
    kind = make_kind(offered=("after_ns",))
    assert kind.make("twice", after_ns=7).after_ns == 7
    assert kind.make("plain", after_ns=7).greet() == "hello"
    with pytest.raises(ConfigError, match="'twice' has no setting 'after_ns'; it has times, word, share"):
        kind.make("twice:after_ns=7")


def test_help_and_table_come_from_the_definitions():
    kind = make_kind(offered=("after_ns",), facts={"says": lambda policy: policy.greet()})
    assert kind.help_text() == (
        "* plain: Says it once.\n\n* twice: Says it again. Settings: times=2, word=hello, share=0.5."
    )
    assert kind.table().splitlines() == [
        "| name | what it does | settings | says | source |",
        "| --- | --- | --- | --- | --- |",
        "| `plain` | Says it once. | none | hello | common practice |",
        "| `twice` | Says it again. | `times=2`, `word=hello`, `share=0.5` | hellohello | a paper, section 2 |",
    ]


def test_a_table_of_policies_without_settings_has_no_column_for_them():
    kind = PolicyKind("greeting", "--greeting", "moestro.flow.policies")
    kind.register("plain", "Says it once.", source="common practice")(Greeting)
    assert kind.table().splitlines() == [
        "| name | what it does | source |",
        "| --- | --- | --- |",
        "| `plain` | Says it once. | common practice |",
    ]


def test_a_policy_that_fails_its_trial_is_refused():
    def try_once(greeting: Greeting) -> None:
        if not greeting.greet():
            raise ValueError("it says nothing")

    with pytest.raises(ConfigError, match=r"greeting 'twice' cannot decide with \{'times': 0\}: it says nothing"):
        make_kind(try_once=try_once).make("twice:times=0")


def test_a_name_belongs_to_one_definition():
    kind = make_kind()
    with pytest.raises(ValueError, match="two policies are registered as greeting 'plain'"):
        kind.register("plain", "Says it too.", source="another paper")(type("Other", (Greeting,), {}))


def test_a_users_file_is_read_only_where_the_kind_and_the_process_accept_it(monkeypatch):
    monkeypatch.setattr(PolicyKind, "read_user_code", None)
    with pytest.raises(ConfigError, match=r"--greeting mine\.py:Mine: it takes no policy from a file; known: pla"):
        make_kind().make("mine.py:Mine")
    kind = make_kind(adapt=lambda found, text: found)
    with pytest.raises(ConfigError, match=r"--greeting mine\.py:Mine: this process reads no users' files"):
        kind.make("mine.py:Mine")
    monkeypatch.setattr(PolicyKind, "read_user_code", lambda flag, path, name: Greeting)
    assert kind.make("mine.py:Mine").greet() == "hello"
