"""Requests whose grammar is not compiled wait outside of the rank, and nobody else does."""

from __future__ import annotations

from concurrent.futures import Future

from support.fake_device import make_request

from moestro.core.grammar import Grammar
from moestro.wire.messages import Abort, Add, Shutdown
from moestro.worker.grammar_inbox import GrammarInbox


class Inbox:
    def __init__(self) -> None:
        self.messages, self.waits, self.num_steps, self.owes = [], [], 0, True

    def receive(self, wait_s):
        self.waits.append(wait_s)
        messages, self.messages = self.messages, []
        return messages

    def has_messages(self) -> bool:
        return bool(self.messages)


class Backend:
    def __init__(self) -> None:
        self.compiled: dict[Grammar, Future] = {}

    def prepare(self, grammar):
        return self.compiled.setdefault(grammar, Future())


def request(name: str, text: str = "") -> Add:
    grammar = Grammar("regex", text) if text else None
    return Add(make_request(name, [1], grammar=grammar))


def test_a_request_comes_when_its_grammar_is_compiled_and_others_pass_it():
    inner, backend = Inbox(), Backend()
    inbox = GrammarInbox(inner, backend)
    slow, plain = request("slow", "a"), request("plain")
    inner.messages = [slow, plain]
    assert inbox.receive(None) == [plain]
    assert inbox.receive(None) == []
    assert inner.waits[0] is None
    assert inner.waits[1] is not None, "the loop must look again"
    assert not inbox.has_messages()
    backend.prepare(Grammar("regex", "a")).set_result(object())
    assert inbox.has_messages()
    inner.messages = [Shutdown()]
    assert inbox.receive(None) == [slow, Shutdown()]
    assert inner.waits[-1] == 0
    assert inbox.receive(None) == []
    assert inner.waits[-1] is None, "nothing is held back"


def test_a_compiled_grammar_is_not_waited_for():
    inner, backend = Inbox(), Backend()
    backend.prepare(Grammar("regex", "a")).set_exception(ValueError())  # the rank ends the request with an error
    inner.messages = [request("r", "a")]
    assert len(GrammarInbox(inner, backend).receive(0)) == 1


def test_an_abort_drops_a_request_that_is_held_back():
    inner, backend = Inbox(), Backend()
    inbox = GrammarInbox(inner, backend)
    inner.messages = [request("r", "a")]
    assert inbox.receive(0) == []
    inner.messages = [Abort(("r",))]
    assert inbox.receive(0) == [Abort(("r",))]
    backend.prepare(Grammar("regex", "a")).set_result(object())
    assert inbox.receive(0) == []


def test_what_the_loop_tells_the_channel_reaches_it():
    inner = Inbox()
    inbox = GrammarInbox(inner, Backend())
    inbox.num_steps, inbox.owes = 7, False
    assert (inner.num_steps, inner.owes) == (7, False) == (inbox.num_steps, inbox.owes)
