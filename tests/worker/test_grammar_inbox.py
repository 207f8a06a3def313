"""Requests with slow grammars wait outside of the rank while many of them run, and no others do."""

from __future__ import annotations

import msgspec
from support.fake_device import make_request

from moestro.core.request import Grammar
from moestro.wire.messages import Abort, Add, Shutdown
from moestro.worker.rank_loop import GrammarInbox


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
    is_waiting = False

    def __init__(self, room: int = 0) -> None:
        self.room = room

    def has_room(self, grammar, num_coming=0):
        return grammar.is_light or num_coming < self.room


def request(name: str, text: str = "", *, is_light: bool = False) -> Add:
    grammar = Grammar("regex", text, is_light=is_light) if text else None
    return Add(make_request(name, [1], grammar=grammar))


def test_requests_with_slow_grammars_wait_for_room_in_order_and_others_pass_them():
    inner, backend = Inbox(), Backend()
    inbox = GrammarInbox(inner, backend)
    first, second, third = (request(f"slow{i}", "a") for i in range(3))
    plain, light = request("plain"), request("light", "a", is_light=True)
    inner.messages = [first, plain, second, light, third]
    assert inbox.receive(None) == [plain, light]
    assert inbox.receive(None) == []
    assert inner.waits[0] is None
    assert inner.waits[1] is not None, "the loop must look again"
    backend.room = 2
    inner.messages = [Shutdown()]
    assert inbox.receive(None) == [first, second, Shutdown()]
    assert inner.waits[-1] == 0
    assert inbox.receive(None) == [third]
    assert inbox.receive(None) == []
    assert inner.waits[-1] is None, "nothing is held back"


def test_clients_take_turns_where_slow_grammars_wait():
    inner, backend = Inbox(), Backend()
    inbox = GrammarInbox(inner, backend)

    def of(client: str, name: str) -> Add:
        message = request(name, "a")
        return Add(msgspec.structs.replace(message.request, client=client))

    inner.messages = [*(of("stranger", f"s{i}") for i in range(5)), of("honest", "h0"), of("honest", "h1")]
    assert inbox.receive(None) == []
    inner.messages = [Abort(("s1",))]
    assert inbox.receive(None) == [Abort(("s1",))]
    order = []
    backend.room = 1
    while messages := inbox.receive(None):
        order += [message.request.request_id for message in messages]
    assert order == ["s0", "h0", "s2", "h1", "s3", "s4"]


def test_no_more_come_at_once_than_there_is_room_for():
    inner, backend = Inbox(), Backend(room=2)
    inner.messages = [request(f"slow{i}", "a") for i in range(5)]
    assert len(GrammarInbox(inner, backend).receive(0)) == 2


def test_the_loop_looks_again_while_a_mask_is_computed():
    inner, backend = Inbox(), Backend()
    backend.is_waiting = True
    GrammarInbox(inner, backend).receive(None)
    assert inner.waits[0] is not None


def test_an_abort_drops_a_request_that_is_held_back():
    inner, backend = Inbox(), Backend()
    inbox = GrammarInbox(inner, backend)
    inner.messages = [request("r", "a")]
    assert inbox.receive(0) == []
    inner.messages = [Abort(("r",))]
    assert inbox.receive(0) == [Abort(("r",))]
    backend.room = 1
    assert inbox.receive(0) == []


def test_what_the_loop_reports_to_the_channel_reaches_it():
    inner = Inbox()
    inbox = GrammarInbox(inner, Backend())
    inbox.num_steps, inbox.owes = 7, False
    assert (inner.num_steps, inner.owes) == (7, False) == (inbox.num_steps, inbox.owes)
