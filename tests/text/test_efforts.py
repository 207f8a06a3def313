"""The effort that a chat template gets for the effort that a client asks for, and the roles that it gets."""

from __future__ import annotations

import pytest

from moestro.errors import RequestError
from moestro.text.chats.chat_template import EFFORTS, as_system_messages, nearest_effort, taken_efforts
from moestro.text.tokenizer import Tokenizer

LADDER = (
    "{%- set level = reasoning_effort | default('xhigh') %}"
    "{%- if level not in ['xhigh', 'medium', 'low'] %}{{ raise_exception('unknown') }}{%- endif %}"
    "{{- level }}{%- for m in messages %}{{- '<' ~ m.role ~ '>' ~ m.content }}{%- endfor %}"
)


def tokenizer(demo_dir, template: str) -> Tokenizer:
    return Tokenizer(demo_dir, template)


@pytest.mark.parametrize(
    ("template", "efforts"),
    [
        (LADDER, ["low", "low", "low", "medium", "xhigh", "xhigh", "xhigh"]),
        ("{{ reasoning_effort }}{{ messages[0].content }}", list(EFFORTS)),
        ("{{ enable_thinking }}{{ messages[0].content }}", list(EFFORTS)),
        ("{{ messages[0].content }}", [None] * 7),
        ("{{ reasoning_effort }}{{ raise_exception('two messages are needed') }}", list(EFFORTS)),
    ],
    ids=["a ladder", "any effort", "thinking alone", "no effort", "a template that refuses the trial"],
)
def test_an_effort_becomes_the_nearest_one_that_the_template_takes(demo_dir, template, efforts):
    reader = tokenizer(demo_dir, template)
    try:
        assert [reader.effort_for(effort) for effort in EFFORTS] == efforts
    finally:
        reader.close()


def test_of_two_efforts_as_near_the_higher_one_is_taken():
    assert nearest_effort("high", ("medium", "xhigh")) == "xhigh"
    assert nearest_effort("none", ()) is None


def test_each_effort_is_tried_once():
    tried = []

    def trial(effort: str) -> None:
        tried.append(effort)
        if effort == "max":
            raise RequestError("unknown")

    assert taken_efforts(trial) == EFFORTS[:-1]
    assert tuple(tried) == EFFORTS


def test_a_developer_is_the_system_where_the_template_knows_no_developer(demo_dir):
    system, developer = ({"role": role, "content": role.upper()} for role in ("system", "developer"))
    user = {"role": "user", "content": "hi"}
    reader = tokenizer(demo_dir, LADDER)
    try:
        assert reader.render_chat([system, developer, user]).endswith("<system>SYSTEM\n\nDEVELOPER<user>hi")
        assert reader.render_chat([developer, user]).endswith("<system>DEVELOPER<user>hi")
    finally:
        reader.close()
    knowing = tokenizer(demo_dir, LADDER + "{# developer #}")
    try:
        assert knowing.render_chat([developer, user]).endswith("<developer>DEVELOPER<user>hi")
    finally:
        knowing.close()


def test_only_messages_of_developers_are_joined():
    system = {"role": "system", "content": "a"}
    assert as_system_messages([system, system]) == [system, system]
