"""A workload as columns: lengths of prompts and answers, users, sessions, shared parts of prompts; and as requests.

Requests have no token ids; each has its hidden future, for replays without a network. A request is built on demand, so
a million requests take no more memory than their columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from moestro.core.hashing import HASH_BYTES
from moestro.core.request import Request, SamplingParams, Script, ServiceClass
from moestro.core.rng import mix64
from moestro.core.work import request_key
from moestro.errors import ConfigError

Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Streams:
    """Texts that only grow, as a forest: each begins like its parent and departs from it after `start` tokens.

    A conversation is a stream: each of its prompts, with or without its answer, is a beginning of that stream. A system
    prompt that many conversations share is their parent.

    Attributes:
        parent: int64[s], parent stream; -1 means none.
        start: int64[s], index of the stream's first own token; 0 without a parent, and at least the parent's `start`.
    """

    parent: Int64s
    start: Int64s

    def segments(self, stream: int) -> list[tuple[int, int]]:
        """The parts of `stream`'s text in order: (stream that owns the tokens, index of the first of them)."""
        found: list[tuple[int, int]] = []
        while stream >= 0:
            found.append((stream, int(self.start[stream])))
            stream = int(self.parent[stream])
        return found[::-1]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """n requests. `hash_ids` or `stream` say what prompts share; without either they share nothing.

    Attributes:
        num_prompt_tokens: int64[n]; 0 where the prompt is a text, whose tokens only the server counts.
        num_output_tokens: int64[n], answer lengths: the trace's hidden future, which no policy sees.
        timestamp_ns: int64[n], not decreasing, or None where no times were recorded.
        hash_ids: one int64[blocks] for each request. An id names a block and all blocks before it.
        block_size: tokens of one hashed block.
        streams: the texts that prompts are beginnings of.
        stream: int64[n], stream of each prompt; the answer continues it.
        texts: the prompts themselves, where the file holds them.
        user, session: int64[n], who sends the request and in which conversation; None means unknown.
        domain: int64[n], source domain of each request, which decides the popularity of experts where a simulation has
            several; None means that all come from domain 0.
        is_ls: bool[n], latency-sensitive (true) or best-effort; None means that all are latency-sensitive.
        is_generated: whether a generator made the rows. Every result made from such rows says so.
        num_left_out: requests of the file that are not among the rows because they had failed.
        ignored_fields: fields of the file that other forms of traces have, and that this one does not use.
        about_times: doubt about the unit of the file's times; empty if there is none.
    """

    num_prompt_tokens: Int64s
    num_output_tokens: Int64s
    timestamp_ns: Int64s | None = None
    hash_ids: tuple[Int64s, ...] | None = None
    block_size: int = 0
    streams: Streams | None = None
    stream: Int64s | None = None
    texts: tuple[str, ...] | None = None
    user: Int64s | None = None
    session: Int64s | None = None
    domain: Int64s | None = None
    is_ls: Bools | None = None
    is_generated: bool = False
    num_left_out: int = 0
    ignored_fields: frozenset[str] = frozenset()
    about_times: str = ""

    @property
    def notes(self) -> list[str]:
        """Sentences about entries that were left out, fields without effect, and times in a doubtful unit."""
        notes = [self.about_times] if self.about_times else []
        if self.num_left_out:
            notes.append(f"entries of the file without an answered request, which are left out: {self.num_left_out:,}")
        if self.ignored_fields:
            names = ", ".join(sorted(self.ignored_fields))
            notes.append(f"fields of the file that have no effect beside its other fields: {names}")
        return notes

    def __len__(self) -> int:
        return len(self.num_output_tokens)

    def select(self, which: Int64s) -> Rows:
        """Select the requests `which`, int64[m], in that order."""
        chosen: dict[str, object] = {}
        for field in fields(self):
            column = getattr(self, field.name)
            if isinstance(column, np.ndarray):
                chosen[field.name] = column[which]
            elif isinstance(column, tuple):
                chosen[field.name] = tuple(column[i] for i in which)
        return replace(self, **chosen)  # type: ignore[arg-type]


def labelled(rows: Rows, ls_share: float, seed: int) -> Rows:
    """Label each request latency-sensitive with probability `ls_share`, else best-effort (QLLM, section 5).

    Raises:
        ConfigError: the share is outside 0 .. 1.
    """
    if not 0 <= ls_share <= 1:
        raise ConfigError(f"the share of latency-sensitive requests must be within 0 .. 1, got {ls_share:g}")
    return replace(rows, is_ls=np.random.default_rng([seed, len(rows)]).random(len(rows)) < ls_share)


def equal_rows(num_requests: int, num_prompt_tokens: int, num_output_tokens: int, num_shared_tokens: int = 0) -> Rows:
    """Requests of equal lengths: `num_shared_tokens` that all prompts share, then `num_prompt_tokens` of their own."""
    shared = num_shared_tokens > 0
    return Rows(
        num_prompt_tokens=np.full(num_requests, num_shared_tokens + num_prompt_tokens, np.int64),
        num_output_tokens=np.full(num_requests, num_output_tokens, np.int64),
        streams=_one_beginning(num_requests, num_shared_tokens) if shared else None,
        stream=np.arange(1, num_requests + 1) if shared else None,
        is_generated=True,
    )


def _one_beginning(num_streams: int, num_shared_tokens: int) -> Streams:
    """Build streams 1 .. `num_streams`, which share stream 0 as their beginning."""
    parent, start = np.zeros(num_streams + 1, np.int64), np.full(num_streams + 1, num_shared_tokens, np.int64)
    parent[0], start[0] = -1, 0
    return Streams(parent, start)


# Names of a replayed request's KV blocks, derived from what its trace says is shared, not from tokens.
#
# Under one key, equal text after equal beginnings has equal names, and other text has other names. These names differ
# from those of `core.hashing.hash_blocks` for prompts that `workload.generated.draws` writes out.
# A name costs a few nanoseconds: a number that is unique within the workload is mixed into two words by one bijection
# each, so two blocks of one workload and key cannot collide.

UInt64s = NDArray[np.uint64]

_POSITION_BITS = 24  # low bits: the block's position in its stream; high bits: the stream's number
_UNNAMED = np.uint64(1 << 63)  # marks blocks whose content the trace does not tell: they belong to one request alone


def block_numbers(rows: Rows, index: int, num_tokens: int, block_size: int) -> UInt64s:
    """uint64[num_tokens // block_size], a number for each full block of the first `num_tokens` of request `index`.

    Equal numbers mean equal blocks after equal beginnings. Blocks beyond the trace's information are unique.

    Args:
        num_tokens: tokens of the prompt, or of prompt and answer where the request is part of a stream.
        block_size: tokens of an engine's block. The trace's blocks are split or joined to fit.
    """
    num_blocks = num_tokens // block_size
    if rows.hash_ids is None:
        return _of_stream(rows, index, num_blocks, block_size)
    known = _of_ids(rows.hash_ids[index].astype(np.uint64), rows.block_size, block_size)[:num_blocks]
    if len(known) == num_blocks:
        return known
    own = np.arange(len(known), num_blocks, dtype=np.uint64) + (np.uint64(index << _POSITION_BITS) | _UNNAMED)
    return np.concatenate([known, own])


def block_names(key: bytes, numbers: UInt64s) -> bytes:
    """Pack block numbers into names of HASH_BYTES each.

    Args:
        key: HASH_BYTES bytes, or empty; a different key gives different names.
    """
    low, high = np.frombuffer(key or bytes(HASH_BYTES), "<u8")
    names = np.empty((len(numbers), 2), "<u8")
    np.bitwise_xor(numbers, low, out=names[:, 0])
    np.bitwise_xor(~numbers, high, out=names[:, 1])
    return mix64(names).tobytes()


def check_block_size(rows: Rows, block_size: int) -> None:
    """Refuse an engine's block size that the trace's blocks cannot be split or joined to.

    Raises:
        ConfigError: neither block size is a multiple of the other.
    """
    if rows.hash_ids is None or rows.block_size % block_size == 0 or block_size % rows.block_size == 0:
        return
    raise ConfigError(
        f"the trace is hashed in blocks of {rows.block_size} tokens, which do not fit an engine's blocks of"
        f" {block_size}: give a block size that divides {rows.block_size}, or a multiple of it"
    )


def _of_ids(ids: UInt64s, traced: int, wanted: int) -> UInt64s:
    if wanted >= traced:
        step = wanted // traced
        return ids[step - 1 :: step]  # the last id of a joined block names all of it
    parts = traced // wanted
    cut: UInt64s = np.add.outer(ids * np.uint64(parts), np.arange(parts, dtype=np.uint64)).reshape(-1)
    return cut


def _of_stream(rows: Rows, index: int, num_blocks: int, block_size: int) -> UInt64s:
    """Number a stream's blocks. A block belongs to the last stream that has a token of its own in it."""
    if rows.streams is None or rows.stream is None:
        first = index << _POSITION_BITS
        return np.arange(first, first + num_blocks, dtype=np.uint64)
    numbers = np.arange(num_blocks, dtype=np.uint64)
    segments = rows.streams.segments(int(rows.stream[index]))
    for i, (owner, start) in enumerate(segments):
        end = segments[i + 1][1] // block_size if i + 1 < len(segments) else num_blocks
        numbers[start // block_size : end] += np.uint64(owner << _POSITION_BITS)
    return numbers


# Rows as requests.

_LS = ServiceClass.LS
_NAMED_AT_ONCE = 64  # rows


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestForm:
    """How rows become requests.

    Attributes:
        block_size: tokens of an engine's block.
        hash_key: key of block names, from `core.hashing.hash_key`; empty means the all-zero key.
        max_tokens: limit that every client requests; a longer answer ends there. None means the longest answer of the
            rows: one number for all requests, so that it tells a policy nothing about a single answer.
        max_total_tokens: most tokens of a prompt and its requested answer together; a client requests no more than
            what its prompt leaves. None means no limit.
        names_blocks: whether blocks get names. Without names (prefix caching off) no block is ever found again.
        name: prefix of the request ids; the row's number follows.
    """

    block_size: int
    hash_key: bytes = b""
    max_tokens: int | None = None
    max_total_tokens: int | None = None
    names_blocks: bool = True
    name: str = "row"

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"block_size must be at least 1, got {self.block_size}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if len(self.hash_key) not in {0, HASH_BYTES}:
            raise ConfigError(f"hash_key must hold {HASH_BYTES} bytes or none, got {len(self.hash_key)}")


class RequestMaker:
    """Builds the request and the script of any row, in any order. The same row always gives the same request.

    The `block_hashes` of a request cover every full block of its prompt. Those of a script cover the blocks that its
    answer completes, where rows are streams, so that the next turn's prompt hits them. They are empty where a trace
    describes prompts only (Mooncake); there an answer's blocks get names when a later prompt repeats them.

    Args:
        rows: requests without texts, because the tokens of texts are not known here.

    Raises:
        ConfigError: the rows are texts, are empty, or are hashed in blocks that do not fit the engine's.
    """

    def __init__(self, rows: Rows, form: RequestForm) -> None:
        if rows.texts is not None:
            raise ConfigError("prompts as text have unknown lengths: tokenize them first, or give a trace of lengths")
        if not len(rows):
            raise ConfigError("there are no requests to make")
        check_block_size(rows, form.block_size)
        self.rows = rows
        self.form = form
        cap = int(rows.num_output_tokens.max()) if form.max_tokens is None else form.max_tokens
        self._cap, self._total = cap, form.max_total_tokens
        self._sampling = {cap: SamplingParams(max_tokens=cap)}
        self._named: dict[int, bytes] = {}  # names of rows that will be made next
        self._last_named = -1

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def max_tokens(self) -> int:
        """Limit that every client requests, or the most of them, where what prompts leave differs."""
        return self._cap

    def timed(self, offsets_ns: NDArray[np.int64]) -> Iterator[tuple[Request, Script]]:
        """Yield all rows in order, row i arriving at `offsets_ns[i]`; each is built when its turn comes."""
        for index, arrival_ns in enumerate(offsets_ns):
            yield self.make(index, int(arrival_ns))

    def make(self, index: int, arrival_ns: int) -> tuple[Request, Script]:
        """Build row `index` with the given arrival, and its script."""
        rows = self.rows
        num_prompt, num_output = rows.num_prompt_tokens.item(index), rows.num_output_tokens.item(index)
        names, num_bytes = self._names(index, num_prompt)
        request = Request(
            request_id=f"{self.form.name}-{index}",
            num_prompt_tokens=num_prompt,
            sampling=self._sampling_of(num_prompt),
            arrival_ns=arrival_ns,
            block_hashes=names[:num_bytes],
            hash_key=self.form.hash_key,
            service_class=_LS if rows.is_ls is None or rows.is_ls[index] else ServiceClass.BE,
            user=None if rows.user is None else f"user-{rows.user[index]}",
            session_id=None if rows.session is None else f"session-{rows.session[index]}",
        )
        domain = 0 if rows.domain is None else int(rows.domain[index])
        return request, Script(num_output, names[num_bytes:], request_key(index, domain))

    def _sampling_of(self, num_prompt_tokens: int) -> SamplingParams:
        limit = self._cap if self._total is None else max(min(self._cap, self._total - num_prompt_tokens), 1)
        found = self._sampling.get(limit)
        if found is None:
            found = self._sampling[limit] = SamplingParams(max_tokens=limit)
        return found

    def _names(self, index: int, num_prompt_tokens: int) -> tuple[bytes, int]:
        """Packed names of the prompt's and then the answer's blocks, and how many bytes belong to the prompt."""
        if not self.form.names_blocks:
            return b"", 0
        names = self._named.pop(index, None)
        if names is None:
            # Rows are mostly made in order. Naming the blocks of several at once costs little more than those of one.
            is_next, self._last_named = index == self._last_named + 1, index
            num_rows = min(_NAMED_AT_ONCE, len(self.rows) - index) if is_next else 1
            self._named = self._named_rows(range(index, index + num_rows))
            self._last_named += num_rows - 1
            names = self._named.pop(index)
        return names, num_prompt_tokens // self.form.block_size * HASH_BYTES

    def _named_rows(self, indices: range) -> dict[int, bytes]:
        """Name the blocks of several rows at once."""
        rows, size = self.rows, self.form.block_size
        whole = rows.num_prompt_tokens[indices.start : indices.stop]
        if rows.stream is not None:
            whole = whole + rows.num_output_tokens[indices.start : indices.stop]
        numbers = [block_numbers(rows, i, num, size) for i, num in zip(indices, whole.tolist(), strict=True)]
        names, begin, found = block_names(self.form.hash_key, np.concatenate(numbers)), 0, {}
        for index, each in zip(indices, numbers, strict=True):
            end = begin + len(each) * HASH_BYTES
            found[index], begin = names[begin:end], end
        return found
