"""The experiment that calibrates a server from outside. It has no effects: it yields probes and receives their times.

1. Send more and more requests at once: decode steps of each size, the maximum batch, and the limit of the queue.
2. Send longer and longer prompts, alone: times to first token.
3. Send prompts beside a decode, and count the steps between its tokens: the token budget of a step.
4. Send prompts that begin alike: whether prefixes are cached, and in which blocks.
5. Repeat all of these in random order, so that a drift of the server affects all alike.
6. Fill the prefix cache, and look for what is left of it: the capacity of the KV cache.
7. Send prompts and batches of other sizes, to which nothing is fitted.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from moestro.calibrate.probing.estimate import (
    BesideTime,
    ChunkCount,
    DecodeTime,
    FirstTokenTime,
    Honesty,
    MixedTime,
    StepDurations,
    chunk_count,
    decode_time,
    num_together,
)
from moestro.calibrate.probing.probes import (
    NoteList,
    ProbeAnswer,
    ProbedServer,
    ProbeLimits,
    ProbeRequest,
    Probing,
    PromptKeys,
    ServerProbe,
)
from moestro.errors import MoestroError

_LEAST_MODEL_LEN = 64  # tokens of a sequence
SHORT = 8  # tokens of a prompt that hardly costs anything
_FIRST_ANSWER, _MOST_ANSWER = 24, 512  # tokens of answers whose steps are counted
_BACKGROUND = 6  # tokens of an answer before a prompt is sent beside it
_FIRST_ROUNDS, _MOST_ROUNDS = 3, 12
_REPEATED_BY, _CHUNKS_BY, _FILLED_BY = 0.7, 0.45, 0.9  # shares of the time at which these steps are over
_LONGEST_PROBE = 0.02  # of the time, for one probe
_LONGEST_BATCH = 0.06  # of the time, after which no more requests are sent at once
_SHARED = (67, 111, 158, 205, 331, 413, 520)  # tokens that two prompts have in common
_NUM_CHECKS = 8
_CHECKED_TOKENS = 128  # of a prompt of a checked batch, exclusive
_CROWDED = 0.8  # of the KV cache, from which it may be what lets sequences wait
_SURELY_WHOLE = 257  # tokens of a prompt that may be divided, where the token budget is unknown
_BY_CHANCE = 2  # tokens behind a common prefix that may be equal
_MISS = 0.5  # of a prompt's usual time, from which its prefix was computed again


@dataclass(slots=True)
class Bounds:
    """A whole number and what the experiment knows of it.

    Attributes:
        low, high: it is within these; None: no bound is known.
        why: reason for a missing bound.
    """

    low: int | None = None
    high: int | None = None
    why: str = ""

    @property
    def value(self) -> int | None:
        """The number; None: the bounds leave more than one."""
        return self.low if self.low == self.high else None


@dataclass(slots=True)
class Observed:
    """What the experiment has observed so far.

    Attributes:
        decodes, firsts, mixed, beside: durations of steps.
        check_decodes, check_firsts: durations to which nothing is fitted.
        budget: tokens of a step, a decoding row included.
        max_rows: sequences of a step.
        max_requests: requests that the server accepts at once.
        block_size: tokens of a KV block.
        capacity: tokens of the KV cache.
        caches_prefixes: whether prefixes are cached; None: unknown.
        longest: tokens of the longest prompt that was sent.
        num_rounds: complete rounds.
        notes: sentences for the operator.
    """

    decodes: list[DecodeTime] = field(default_factory=list)
    firsts: list[FirstTokenTime] = field(default_factory=list)
    mixed: list[MixedTime] = field(default_factory=list)
    beside: list[BesideTime] = field(default_factory=list)
    check_decodes: list[DecodeTime] = field(default_factory=list)
    check_firsts: list[FirstTokenTime] = field(default_factory=list)
    budget: Bounds = field(default_factory=Bounds)
    max_rows: Bounds = field(default_factory=Bounds)
    max_requests: Bounds = field(default_factory=Bounds)
    block_size: Bounds = field(default_factory=Bounds)
    capacity: Bounds = field(default_factory=Bounds)
    caches_prefixes: bool | None = None
    longest: int = 1
    num_rounds: int = 0
    notes: NoteList = field(default_factory=NoteList)

    @property
    def durations(self) -> StepDurations:
        """The durations to fit, without prompts whose division into chunks is unknown."""
        firsts = [each for each in self.firsts if self.is_divided_as_known(each.new)]
        return StepDurations(self.decodes, firsts, self.mixed, self.beside, self.budget.value)

    def is_divided_as_known(self, new: int) -> bool:
        """Whether it is known into which chunks a prompt of `new` tokens is divided."""
        return self.budget.value is not None or new < (self.budget.low or _SURELY_WHOLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """What came of requests that were sent at once.

    Attributes:
        accepted: requests that the server did not refuse.
        rows: requests that decoded before the first one ended.
        num_tokens: tokens that all requests would have at their ends.
        time: mean step, where all of them decoded together for a while.
        may_limit_rate: whether some were refused with 429, which also says that requests come too often.
    """

    accepted: int
    rows: int
    num_tokens: int = 0
    time: DecodeTime | None = None
    may_limit_rate: bool = False


Answered = Generator[ServerProbe, ProbeAnswer, ProbeAnswer]


class ProbeDesign:
    """What the experiments on an idle server and beside traffic have in common.

    Args:
        server: what is known of the server.
        limits: bounds of the experiment.
        num_reserved: tokens of an answer behind the longest prompt.
        seed: seed of the orders and sizes.

    Attributes:
        observed: what it has observed.

    Raises:
        MoestroError: the server's sequences are too short.
    """

    def __init__(self, server: ProbedServer, limits: ProbeLimits, num_reserved: int, seed: int) -> None:
        self.observed = Observed()
        self._limits = limits
        longest = limits.max_prompt_tokens
        if server.max_model_len and server.max_model_len < _LEAST_MODEL_LEN:
            raise MoestroError(
                f"the server takes sequences of {server.max_model_len} tokens, and probes need {_LEAST_MODEL_LEN}"
            )
        self._longest = min(longest, (server.max_model_len or longest) - num_reserved)
        self._honesty = Honesty(server, limits, self.observed.notes)
        self._rng, self._keys = np.random.default_rng(seed), PromptKeys()
        self._elapsed_s = self._took_s = 0.0

    def _send(self, kind: str, *requests: ProbeRequest) -> Answered:
        answer = yield ServerProbe(kind, requests)
        self._took_s, self._elapsed_s = answer.elapsed_s - self._elapsed_s, answer.elapsed_s
        self._honesty.check(kind, requests, answer)
        return answer

    def _alone(self, num_tokens: int, max_tokens: int = 1) -> ProbeRequest:
        return ProbeRequest(key=self._keys.new(), num_tokens=num_tokens, max_tokens=max_tokens)

    def _is_over(self, share: float) -> bool:
        return self._elapsed_s >= share * self._limits.seconds


class IdleDesign(ProbeDesign):
    """The experiment on a server without other traffic.

    Args:
        server: what is known of the server.
        limits: bounds of the experiment.
        seed: seed of the orders and sizes.

    Attributes:
        observed: what it has observed.
    """

    def __init__(self, server: ProbedServer, limits: ProbeLimits, seed: int = 0) -> None:
        super().__init__(server, limits, 1, seed)
        self._most_answer = max(min(_MOST_ANSWER, self._longest // 2), _FIRST_ANSWER)
        self._answer_of: dict[int, int] = {}  # tokens of the answers by the number of rows, where more than the first
        self._rows: list[int] = []
        self._tokens_of_rows = 0  # that the requests of the maximum batch, and those that waited, would have had
        self._lengths: list[int] = []

    def run(self) -> Probing:
        """Yield probes until all steps are done or the time is over.

        Raises:
            MoestroError: the server refuses, fails, is busy, too slow, or contradicts itself; the text says which.
        """
        for _ in range(2):  # what a server does once is not measured
            yield from self._send("warm-up", self._alone(SHORT, _FIRST_ANSWER))
        yield from self._grow_rows()
        yield from self._grow_prompts()
        yield from self._find_budget()
        yield from self._find_prefixes()
        yield from self._repeat()
        yield from self._find_capacity()
        yield from self._check()
        self._honesty.at_end(self.observed.decodes, self.observed.capacity.low, self.observed.block_size.value)

    def _was_long(self, share: float = _LONGEST_PROBE) -> bool:
        return self._took_s > share * self._limits.seconds

    # --- decodes ----------------------------------------------------------------------------------------------------

    def _grow_rows(self) -> Probing:
        """Double the requests at once until some wait, are refused, or the probe takes long."""
        seen, rows = self.observed, 1
        while True:
            found = yield from self._decode(rows, SHORT)
            if found.accepted < rows:
                why = f"the server accepts no more than {found.accepted} requests at once"
                seen.max_requests = Bounds(found.accepted, found.accepted)
                if found.may_limit_rate:
                    why = f"{rows - found.accepted} of {rows} requests at once got 429, which may limit their rate"
                    seen.max_requests = Bounds(found.accepted, why=why)
                seen.max_rows.why = why
                yield from self._send("after refusals", self._alone(SHORT))  # refused too: the rate is limited
                break
            if found.rows < rows:  # longer answers did not change it: the others wait
                seen.max_rows, self._tokens_of_rows = Bounds(found.rows, found.rows), found.num_tokens
                break
            if found.time is not None:
                self._rows.append(rows)
                seen.decodes.append(found.time)
            seen.max_rows.low = rows
            if rows >= self._limits.max_concurrency or self._was_long(_LONGEST_BATCH):
                which = "--max-concurrency" if rows >= self._limits.max_concurrency else "a longer --seconds"
                seen.max_rows.why = f"{rows} requests at once all decoded together: give {which} to try more"
                break
            rows = min(2 * rows, self._limits.max_concurrency)
        if not self._rows:
            raise MoestroError(
                "no decode step could be timed: tokens of one answer arrived too seldom. Give more --seconds"
            )
        if seen.max_rows.high is not None and seen.max_rows.high not in self._rows:
            self._rows.append(seen.max_rows.high)

    def _decode(self, rows: int, num_tokens: int) -> Generator[ServerProbe, ProbeAnswer, Together]:
        """Send `rows` requests, with longer and longer answers until all of them decode together or some wait."""
        before = 0
        while True:
            length = self._answer_of.get(rows, _FIRST_ANSWER)
            requests = [self._alone(num_tokens, length) for _ in range(rows)]
            answer = yield from self._send("decode", *requests)
            accepted = sum(each.failure is None for each in answer.requests)
            together = num_together(answer)
            if accepted < rows:
                is_429 = any(each.failure == "http_429" for each in answer.requests)
                return Together(accepted=accepted, rows=together, may_limit_rate=is_429)
            time = decode_time(answer) if together == rows else None
            if time is not None or length >= self._most_answer or self._was_long() or 0 < together == before < rows:
                return Together(accepted=accepted, rows=together, num_tokens=rows * (num_tokens + length), time=time)
            before = together
            self._answer_of[rows] = min(2 * length, self._most_answer)

    def _decode_again(self, rows: int, num_tokens: int) -> Probing:
        found = yield from self._decode(rows, num_tokens)
        if found.time is not None:
            self.observed.decodes.append(found.time)

    # --- prompts ----------------------------------------------------------------------------------------------------

    def _grow_prompts(self) -> Probing:
        sizes = [1, SHORT, 32, *(64 * 2**i for i in range(12) if 64 * 2**i < self._longest), self._longest]
        for size in sizes:
            yield from self._first_token(size)
            self._lengths.append(size)
            if self._was_long():
                break

    def _first_token(self, num_tokens: int) -> Probing:
        answer = yield from self._send("prompt", self._alone(num_tokens))
        times = answer.requests[0]
        self.observed.longest = max(self.observed.longest, num_tokens)
        self.observed.firsts.append(FirstTokenTime(new=times.num_prompt_tokens, cached=0, ns=times.ttft_ns))

    # --- the budget of a step ---------------------------------------------------------------------------------------

    def _find_budget(self) -> Probing:
        """Bisect for the longest prompt that one step computes beside a decode."""
        budget, longest = self.observed.budget, self._lengths[-1]
        found = yield from self._count_chunks(longest)
        if found.num_steps is None:
            budget.why = (
                f"steps with a prompt of {longest:,} tokens do not differ clearly from steps without one, or the server"
                " computes prompts before decodes"
            )
            return
        if found.num_steps == 1:
            budget.low = longest + 1
            budget.why = f"a prompt of {longest:,} tokens was computed in one step: give more --max-prompt-tokens"
            return
        low, high = -(-longest // found.num_steps), (longest - 1) // (found.num_steps - 1)
        while low < high and not self._is_over(_CHUNKS_BY):
            middle = (low + high + 1) // 2
            found = yield from self._count_chunks(middle)
            if found.num_steps is None:
                break
            if found.num_steps == 1:
                low = middle
            else:
                high = middle - 1
        # One token of the budget is the decode's.
        budget.low, budget.high = low + 1, high + 1
        if low < high:
            budget.why = "the time for it was over"
            return
        for size, expected in ((low, 1), (low + 1, 2)):
            found = yield from self._count_chunks(size)
            if found.num_steps != expected:
                self.observed.budget = Bounds(why="the steps of a prompt could not be counted reliably")
                return

    def _count_chunks(self, num_tokens: int) -> Generator[ServerProbe, ProbeAnswer, ChunkCount]:
        """Count the steps of a prompt beside a decode; two attempts if tokens of both do not come together."""
        found = ChunkCount(num_steps=None)
        for attempt in range(2):
            length = self._answer_of.get(0, _FIRST_ANSWER)
            beside = ProbeRequest(key=self._keys.new(), num_tokens=num_tokens, max_tokens=1, after=_BACKGROUND)
            answer = yield from self._send("chunk", self._alone(SHORT, length), beside)
            if any(each.is_refused for each in answer.requests):
                break
            if answer.requests[0].deliveries[-1] <= answer.requests[1].deliveries[0]:
                self._answer_of[0] = min(2 * length, self._most_answer)  # the decode ended before the prompt did
                continue
            found = chunk_count(answer)
            if found.num_steps == 1:
                new = answer.requests[1].num_prompt_tokens
                self.observed.mixed.append(MixedTime(context=found.context, new=new, ns=found.first_ns))
            if found.num_steps is not None or attempt:
                break
        return found

    # --- the prefix cache -------------------------------------------------------------------------------------------

    def _find_prefixes(self) -> Probing:
        """Send pairs of prompts that begin alike, and see how much of the second one is found."""
        seen, found, shared = self.observed, [], [each for each in _SHARED if each + SHORT <= self._longest]
        for num_shared in shared:
            hit = yield from self._hit_tokens(num_shared, SHORT)
            if hit is not None:
                found.append((num_shared, hit))
        hits = [hit for _, hit in found if hit]
        if hits:
            seen.caches_prefixes = True
            sizes = _block_sizes(found)
            pairs = ", ".join(f"{hit} of {num_shared}" for num_shared, hit in found)
            if len(sizes) == 1:
                seen.block_size = Bounds(sizes[0], sizes[0])
            elif sizes:
                words = " or ".join(map(str, sizes))
                seen.block_size.why = f"hits of {pairs} tokens fit blocks of {words}: give more --max-prompt-tokens"
            else:
                seen.block_size.why = f"hits of {pairs} tokens in common are no multiples of one size"
            return
        seen.block_size.why = "the server reports no cached tokens, neither in usage nor in /metrics"
        seen.caches_prefixes = yield from self._is_faster_again()
        if not seen.caches_prefixes:
            seen.block_size.why = "no prefix was found in a cache"

    def _hit_tokens(self, num_shared: int, num_own: int) -> Generator[ServerProbe, ProbeAnswer, int | None]:
        """Return the tokens of a prompt that an earlier one left in the cache, as far as the server reports them."""
        key = self._keys.new()
        yield from self._send("prefix", ProbeRequest(key=key, num_tokens=num_shared + num_own, max_tokens=1))
        again = ProbeRequest(
            key=key, num_tokens=num_shared + num_own, max_tokens=1, own_key=self._keys.new(), num_shared=num_shared
        )
        answer = yield from self._send("prefix again", again)
        hit = _reported_hit(answer)
        if hit is not None and not 0 <= hit <= num_shared + _BY_CHANCE:
            raise MoestroError(
                f"the server reports {hit} cached tokens of a prompt that has {num_shared} in common with earlier ones:"
                " it counts them wrongly, was restarted, or has other traffic. Nothing was fitted"
            )
        if hit:
            times = answer.requests[0]
            new = times.num_prompt_tokens - hit
            self.observed.firsts.append(FirstTokenTime(new=new, cached=hit, ns=times.ttft_ns))
        return hit

    def _is_faster_again(self) -> Generator[ServerProbe, ProbeAnswer, bool | None]:
        """Whether a long prompt takes clearly less time when it comes again; None: prompts take no time."""
        size, ratios = self._lengths[-1], []
        usual = min(each.ns for each in self.observed.firsts if each.new <= SHORT)
        for _ in range(3):
            request = self._alone(size)
            first = (yield from self._send("prefix", request)).requests[0].ttft_ns
            again = (yield from self._send("prefix again", request)).requests[0].ttft_ns
            if first < 2 * usual:
                self.observed.block_size.why = "a long prompt takes hardly longer than a short one"
                return None
            ratios.append((again - usual) / (first - usual))
        return float(np.median(ratios)) < _MISS

    # --- repeats ----------------------------------------------------------------------------------------------------

    def _repeat(self) -> Probing:
        """Repeat all probes in rounds of random order."""
        points = [partial(self._decode_again, rows, SHORT) for rows in self._rows]
        points += [partial(self._decode_again, *point) for point in self._long_contexts()]
        points += [partial(self._first_token, size) for size in self._lengths]
        points += [partial(self._chunk_again, size) for size in self._chunk_sizes()]
        if self.observed.block_size.value is not None:
            points += [partial(self._hit_again, size) for size in self._lengths if size > 2 * _SHARED[0]]
        while self.observed.num_rounds < _MOST_ROUNDS:
            for number in self._rng.permutation(len(points)).tolist():
                if self._is_over(_REPEATED_BY) and self.observed.num_rounds >= _FIRST_ROUNDS:
                    return
                if self._is_over(1.0):
                    raise MoestroError(
                        f"the server is too slow for --seconds {self._limits.seconds:g}: {self.observed.num_rounds} of"
                        f" {_FIRST_ROUNDS} rounds of {len(points)} probes were done. Give more --seconds, or fewer"
                        " --max-concurrency and --max-prompt-tokens"
                    )
                yield from points[number]()
            self.observed.num_rounds += 1

    def _long_contexts(self) -> list[tuple[int, int]]:
        """(rows, tokens of each prompt) for the cost of context: few rows with long prompts, and all with middling."""
        rows = (1, self._rows[len(self._rows) // 2], max(self._rows))
        longest = self._longest - self._most_answer - 1
        first, last = self.observed.firsts[0], self.observed.firsts[-1]
        token_ns = max(last.ns - first.ns, 1.0) / max(last.new - first.new, 1)
        affordable = _LONGEST_PROBE * self._limits.seconds * 1e9 / token_ns
        parts = zip(rows, (1, 2, 8), strict=True)
        return sorted({(n, max(min(longest // part, int(affordable / n)), 2 * SHORT)) for n, part in parts})

    def _chunk_sizes(self) -> list[int]:
        """Sizes of prompts that one step computes beside a decode."""
        within = [size for size in self._lengths if size >= 64 and size < (self.observed.budget.low or math.inf)]
        return within if self.observed.mixed else []

    def _chunk_again(self, num_tokens: int) -> Probing:
        yield from self._count_chunks(num_tokens)

    def _hit_again(self, num_tokens: int) -> Probing:
        yield from self._hit_tokens(num_tokens // 2, num_tokens - num_tokens // 2)

    # --- the capacity of the KV cache -------------------------------------------------------------------------------

    def _find_capacity(self) -> Probing:
        """Fill the prefix cache with prompts, and request them again, the last ones first, until one is gone."""
        capacity, block = self.observed.capacity, self.observed.block_size.value
        if not self.observed.caches_prefixes or block is None:
            known = "the size of its blocks" if self.observed.caches_prefixes else "reported hits of a prefix cache"
            capacity.why = f"without {known} nothing tells what it holds"
            return
        # Half a block more than whole blocks: a prompt found as a whole would be computed in part again.
        size = max(min(self._longest // 2, 1024) // block, 1) * block + max(block // 2, 1)
        recent: list[int] = []  # the last used first
        while not self._is_over(_FILLED_BY):
            for _ in range(max(len(recent), 8)):
                recent.insert(0, self._keys.new())
                yield from self._send("fill", ProbeRequest(key=recent[0], num_tokens=size, max_tokens=1))
                if self._is_over(_FILLED_BY):
                    break
            held = 0
            for number, key in enumerate(recent):
                answer = yield from self._send("look", ProbeRequest(key=key, num_tokens=size, max_tokens=1))
                hit = max(_reported_hit(answer) or 0, 0)
                held += hit
                if hit < size // block * block:
                    # Each look takes a block for its last tokens, which may be one of those that are looked for.
                    slack = (number + 3) * block + (0 if hit else size)
                    capacity.low, capacity.high = held, held + slack
                    self._doubt_rows()
                    return
            capacity.low = held
            recent.reverse()
        capacity.why = f"the cache still held all of the {capacity.low or 0:,} tokens for which there was time"

    def _doubt_rows(self) -> None:
        """Withdraw a maximum batch for which the KV cache may have had no room."""
        rows, held = self.observed.max_rows, self.observed.capacity.low
        if rows.high is not None and held is not None and self._tokens_of_rows > _CROWDED * held:
            rows.high = None
            rows.why = f"the KV cache of about {held:,} tokens holds no more sequences of the probes"

    # --- the check --------------------------------------------------------------------------------------------------

    def _check(self) -> Probing:
        """Time prompts and batches of sizes between the probed ones. Nothing is fitted to them."""
        seen, held_back = self.observed, len(self.observed.decodes)
        most = math.log(self._lengths[-1])
        for number in range(_NUM_CHECKS):
            if self._is_over(1.0):
                return
            if number % 2:
                size = int(math.exp(self._rng.uniform(math.log(16), max(most, math.log(17)))))
                times = (yield from self._send("check", self._alone(size))).requests[0]
                new = times.num_prompt_tokens
                seen.check_firsts.append(FirstTokenTime(new=new, cached=0, ns=times.ttft_ns))
                continue
            rows = int(self._rng.integers(1, max(self._rows) + 1))
            self._answer_of.setdefault(rows, max(self._answer_of.get(each, _FIRST_ANSWER) for each in self._rows))
            most_tokens = max(min(_CHECKED_TOKENS, self._longest - self._most_answer), SHORT + 1)
            found = yield from self._decode(rows, int(self._rng.integers(SHORT, most_tokens)))
            if found.time is not None:
                seen.check_decodes.append(found.time)
        assert held_back == len(seen.decodes), "checks are not fitted"


def _block_sizes(found: list[tuple[int, int]]) -> list[int]:
    """Return the sizes of blocks that all hits fit, ascending.

    Args:
        found: (tokens in common, tokens found) of pairs of prompts, of which at least one was found.
    """
    largest = math.gcd(*(hit for _, hit in found if hit))
    divisors = (size for size in range(1, largest + 1) if largest % size == 0)
    return [size for size in divisors if all(hit == shared // size * size for shared, hit in found)]


def _reported_hit(answer: ProbeAnswer) -> int | None:
    """Tokens of a prompt found in the cache by the server's own words; None: it says nothing."""
    if hit := answer.requests[0].num_cached_tokens:
        return hit
    before, after = answer.before, answer.after
    if before is None or after is None or before.num_hit_tokens is None or after.num_hit_tokens is None:
        return None
    return after.num_hit_tokens - before.num_hit_tokens
