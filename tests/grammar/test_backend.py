"""Masks of a rank: what is allowed after which tokens, in any batch, and matchers that fail."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import socket
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import plain_grammar
from support.plain_grammar import ENDS, PATTERNS, Patience, backend, light, token_texts
from support.running import wait_until

from moestro.core.request import Grammar, MaskRequest, SamplingParams
from moestro.grammar import backend as backend_module
from moestro.grammar import host as host_module
from moestro.grammar import host_process
from moestro.grammar.backend import MAX_SLOW, MaskBackend, WaitAllowance
from moestro.grammar.compiler import GrammarCompiler, VocabularySource
from moestro.grammar.host_process import compute_masks
from moestro.text.child_process import write_message

VOCABULARY = 50
NONE = np.empty(0, np.int32)


def ids(text: str) -> list[int]:
    return [token_texts(VOCABULARY).index(letter) for letter in text]


def mask_request(matcher, generated, unwanted=NONE) -> MaskRequest:
    return MaskRequest(matcher, np.array(generated, np.int32), np.array(unwanted, np.int32))


def tokens_of(mask) -> list[int]:
    bits = np.unpackbits(mask.words().view(np.uint8), bitorder="little", count=VOCABULARY)
    return np.flatnonzero(bits).tolist()


def following(pattern: str, text: str, **wishes) -> list[int]:
    masks = backend(VOCABULARY)
    (mask,) = masks.masks([mask_request(masks.matcher(light(pattern)), ids(text), **wishes)])
    return tokens_of(mask)


def test_only_end_tokens_follow_a_complete_text():
    assert following("ab|c", "") == [*ids("ac"), token_texts(VOCABULARY).index("ab")]
    assert following("ab", "a") == ids("b")
    assert following("ab", "ab") == list(ENDS)
    assert following("ab?", "a") == [*ENDS, *ids("b")]


def test_an_answer_that_passed_the_end_is_free_as_in_vllm():
    masks = backend(VOCABULARY)
    matcher = masks.matcher(light("a"))
    texts = [ids("a"), [*ids("a"), 0], [*ids("a"), 0, 7, 9]]
    counts = [len(tokens_of(masks.masks([mask_request(matcher, text)])[0])) for text in texts]
    assert counts == [2, VOCABULARY, VOCABULARY]


def test_unwanted_tokens_stay_only_where_there_are_no_others():
    assert following("ab?", "a", unwanted=ENDS) == ids("b")
    assert following("ab?", "ab", unwanted=ENDS) == list(ENDS)


@pytest.mark.parametrize("seed", range(5))
def test_masks_equal_their_plain_twin_in_any_batch_and_any_order(seed):
    rng, masks = np.random.default_rng(seed), backend(VOCABULARY)
    answers = [(light(str(rng.choice(PATTERNS))), [], None) for _ in range(8)]
    answers = [(grammar, generated, masks.matcher(grammar)) for grammar, generated, _ in answers]
    for _ in range(12):
        chosen = [answers[i] for i in rng.permutation(8)[: rng.integers(1, 9)]]
        # A matcher that skipped some tokens, or is new as on another engine, reads them now.
        requests = [
            mask_request(masks.matcher(grammar) if rng.random() < 0.3 else matcher, generated)
            for grammar, generated, matcher in chosen
        ]
        for (grammar, generated, _), mask in zip(chosen, masks.masks(requests), strict=True):
            sampling = SamplingParams(max_tokens=99, grammar=grammar)
            allowed = np.flatnonzero(plain_grammar.allowed(generated, sampling, VOCABULARY)).tolist()
            assert tokens_of(mask) == allowed
            if not set(generated) & set(ENDS):
                generated.append(int(rng.choice(allowed)))


@pytest.fixture
def masks():
    """A backend of the test's own, whose processes it may end."""
    source = VocabularySource(plain_grammar.tokenizer_directory(VOCABULARY), VOCABULARY, ENDS)
    masks = MaskBackend(source, Patience())
    yield masks
    masks.close()


def next_mask(masks: MaskBackend, matcher, text: str) -> list[int]:
    """The mask after a text, however late it comes."""
    (mask,) = masks.masks([mask_request(matcher, ids(text))])
    if mask.words() is None:
        wait_until(lambda: masks.is_ready(matcher))
        (mask,) = masks.masks([mask_request(matcher, ids(text))])
    return tokens_of(mask)


def forks(masks: MaskBackend) -> list[int]:
    """Processes of a backend, the oldest first."""
    host = masks._host._process.pid
    return [int(each) for each in Path(f"/proc/{host}/task/{host}/children").read_text().split()]


def process_that_ends() -> socket.socket:
    """A process that ends in its first job."""
    own, theirs = socket.socketpair()
    with theirs:
        write_message(theirs.fileno(), host_module.BEGUN)
    return own


def test_a_token_that_the_grammar_excludes_fails_the_matcher_and_no_other():
    masks = backend(VOCABULARY)
    wrong, right = (masks.matcher(light("ab")) for _ in range(2))
    first, second = masks.masks([mask_request(wrong, ids("z")), mask_request(right, ids("a"))])
    assert (tokens_of(first), tokens_of(second)) == ([], ids("b"))
    assert masks.failure(wrong) is not None
    assert masks.failure(right) is None


@pytest.mark.parametrize("is_light", [True, False])
def test_a_grammar_that_does_not_compile_fails_its_matcher(is_light):
    masks = backend(VOCABULARY)
    matcher = masks.matcher(Grammar("regex", "(a", is_light=is_light))
    assert next_mask(masks, matcher, "") == []
    assert "unclosed" in masks.failure(matcher)


def test_nothing_waits_for_a_slow_grammar(masks, monkeypatch):
    matcher = masks.matcher(Grammar("regex", "ab"))
    assert next_mask(masks, matcher, "")
    (pid,) = forks(masks)
    os.kill(pid, signal.SIGSTOP)
    (late,) = masks.masks([mask_request(matcher, ids("a"))])
    waits: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(masks._allowance, "left_s", lambda: 0.001 if len(waits) < 3 else 0)
        patch.setattr(masks._allowance, "spend", waits.append)
        assert late.words() is None, "its process stands still"
    assert not waits
    assert not masks.is_ready(matcher)
    assert next_mask(masks, masks.matcher(light("ab")), "a") == ids("b"), "the process of light ones goes on"
    os.kill(pid, signal.SIGCONT)
    assert next_mask(masks, matcher, "a") == ids("b")
    assert late.words() is None, "a mask that was late stays so in its step"


def test_masks_cost_a_rank_a_share_of_its_time_and_no_more():
    now_ns = [0]
    allowance = WaitAllowance(lambda: now_ns[0])
    waited_ns = 0
    for _ in range(1000):
        now_ns[0] += 1_000_000
        left_ns = int(1e9 * allowance.left_s())
        allowance.spend(left_ns)
        now_ns[0] += left_ns
        waited_ns += left_ns
    assert waited_ns <= allowance.MOST_NS + allowance.SHARE * now_ns[0]
    allowance.spend(10**9)
    assert allowance.left_s() == 0


def test_a_grammar_beyond_the_bounds_of_the_first_process_moves_to_the_second(masks, monkeypatch):
    monkeypatch.setattr(backend_module, "START_NS", -1)
    monkeypatch.setattr(backend_module, "MASK_NS", 0)
    matcher = masks.matcher(light("abc"))
    assert [next_mask(masks, matcher, text) for text in ("", "a", "ab")][1:] == [ids("b"), ids("c")]
    assert matcher.is_slow
    assert masks._slow.num_processes == 1


def test_the_end_of_a_process_moves_one_request_and_the_others_go_on(masks):
    lights = [masks.matcher(light(text)) for text in ("ab", "cd")]
    assert [tokens_of(mask) for mask in masks.masks([mask_request(each, []) for each in lights])][1] == ids("c")
    (pid,) = forks(masks)
    os.kill(pid, signal.SIGKILL)
    masks.masks([mask_request(each, ids(text)) for each, text in zip(lights, "ac", strict=True)])
    assert [next_mask(masks, each, text) for each, text in zip(lights, "ac", strict=True)] == [ids("b"), ids("d")]
    assert masks._quick.num_processes == 2
    assert sorted(each.is_slow for each in lights) == [False, True]  # the first in line, which is the cheaper one


def test_a_request_whose_grammar_ends_its_process_twice_fails_alone(masks, monkeypatch):
    hostile, honest = (masks.matcher(Grammar("regex", text)) for text in ("a+", "ab"))
    with monkeypatch.context() as patch:
        patch.setattr(masks._slow, "_fork", process_that_ends)
        masks.masks([mask_request(hostile, [])])
        wait_until(lambda: masks.is_ready(hostile) and masks.failure(hostile))
    assert masks._slow.num_processes == 2
    assert masks.failure(hostile) == "it takes more than 4 s or 1280 MiB to compile"
    assert next_mask(masks, hostile, "") == []
    assert next_mask(masks, honest, "a") == ids("b")


def test_the_end_of_the_host_blames_no_grammar(masks):
    matcher = masks.matcher(light("ab"))
    assert next_mask(masks, matcher, "")
    masks._recover(masks._quick, [host_module.LEAVING])
    masks._quick.close()
    os.kill(masks._host._process.pid, signal.SIGKILL)  # it may be found dead later than the next process is wanted
    assert next_mask(masks, matcher, "a") == ids("b")
    assert not matcher.is_slow


def test_a_process_that_holds_enough_leaves_and_its_next_one_reads_the_answers_anew(masks, monkeypatch):
    monkeypatch.setattr(host_process, "_resident_bytes", itertools.cycle([0, 0, 1]).__next__)
    compiler = GrammarCompiler(masks._host._source)
    bounds = host_module.ProcessBounds(cpu_s=0, memory_bytes=0, kept_bytes=0, niceness=0)
    processes = []

    def fork() -> socket.socket:
        own, theirs = socket.socketpair()
        processes.append(threading.Thread(target=lambda: run(theirs)))
        processes[-1].start()
        return own

    def run(file: socket.socket) -> None:
        with file:
            write_message(file.fileno(), host_module.BEGUN)
            with contextlib.suppress(OSError):  # the test has closed the socket
                compute_masks(file.fileno(), compiler, bounds)

    masks._quick._fork = fork
    monkeypatch.setattr(host_process.signal, "setitimer", lambda *_: None)  # which only a main thread has
    matcher = masks.matcher(light("abcd"))
    assert [next_mask(masks, matcher, "abc"[:n]) for n in range(4)] == [*map(ids, "abcd")]
    assert (masks._quick.num_processes, matcher.is_slow) == (2, False), masks.failure(matcher)
    masks._quick.close()
    for process in processes:
        process.join()
    masks._recover(masks._quick, [host_module.LEAVING, matcher.number])  # it left before its next job
    assert not matcher.is_slow
    masks._recover(masks._quick, [matcher.number])
    assert matcher.is_slow, "the process ended in that job"


def test_the_second_process_serves_the_answer_that_has_cost_least(masks, monkeypatch):
    sent: list[int] = []
    monkeypatch.setattr(masks._slow, "send", lambda jobs: sent.extend(job.matcher for job in jobs))
    dear, cheap, new = (masks.matcher(Grammar("regex", text)) for text in ("[a-c]{9}", "[a-c]{8}", "[a-c]{7}"))
    dear.cost_ns, cheap.cost_ns, masks._served_ns = 9000, 3000, 5000
    masks.masks([mask_request(each, []) for each in (dear, cheap, new)])
    masks._send_slow()
    masks._send_slow()
    assert sent == [cheap.number, new.number, dear.number]
    assert new.cost_ns == 5000, "who comes anew does not pass those who have waited"


def test_a_mask_that_does_not_come_in_time_fails_its_answer_alone(masks, monkeypatch):
    """On a machine whose processors are full the second process gets nothing."""
    now_s = [1000.0]
    monkeypatch.setattr(masks, "_now_s", lambda: now_s[0])
    computed, queued = (masks.matcher(Grammar("regex", text)) for text in ("ab", "cd"))
    assert next_mask(masks, computed, "") == ids("a")
    (pid,) = forks(masks)
    os.kill(pid, signal.SIGSTOP)
    masks.masks([mask_request(computed, ids("a"))])
    now_s[0] += 1
    masks.masks([mask_request(queued, [])])
    for waits_s, are_ready in ((host_module.LONGEST_WAIT_S - 0.5, [True, False]), (1, [True, True])):
        now_s[0] += waits_s
        assert [masks.is_ready(each) for each in (computed, queued)] == are_ready
    assert "60 s" in masks.failure(computed)
    assert next_mask(masks, masks.matcher(light("ab")), "a") == ids("b")
    os.kill(pid, signal.SIGCONT)
    assert next_mask(masks, masks.matcher(Grammar("regex", "ef")), "e") == ids("f"), "the process goes on"
    assert [masks.failure(each) is not None for each in (computed, queued)] == [True, True]


def test_few_slow_grammars_run_at_once(masks):
    slow = Grammar("regex", "ab")
    held = [masks.matcher(slow) for _ in range(MAX_SLOW - 1)]
    assert masks.has_room(slow)
    assert not masks.has_room(slow, num_coming=1)
    assert masks.has_room(replace(slow, is_light=True), num_coming=99)
    held.append(masks.matcher(slow))
    assert not masks.has_room(slow)
    held.clear()
    gc.collect()
    assert masks.has_room(slow)
