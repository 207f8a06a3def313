"""Rows as requests without token ids, each with its hidden future, for replays without a network.

A request is built on demand, so a million requests take no more memory than their columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moestro.core.hashing import HASH_BYTES
from moestro.core.request import Request, SamplingParams, Script, ServiceClass
from moestro.core.work import request_key
from moestro.errors import ConfigError
from moestro.workload.rows import Rows, block_names, block_numbers, check_block_size

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
        names_blocks: whether blocks get names. Without names (prefix caching off) no block is ever found again.
        name: prefix of the request ids; the row's number follows.
    """

    block_size: int
    hash_key: bytes = b""
    max_tokens: int | None = None
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
        self._sampling = SamplingParams(max_tokens=cap)
        self._named: dict[int, bytes] = {}  # names of rows that will be made next
        self._last_named = -1

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def max_tokens(self) -> int:
        """Limit that every client requests."""
        return self._sampling.max_tokens

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
            sampling=self._sampling,
            arrival_ns=arrival_ns,
            block_hashes=names[:num_bytes],
            hash_key=self.form.hash_key,
            service_class=_LS if rows.is_ls is None or rows.is_ls[index] else ServiceClass.BE,
            user=None if rows.user is None else f"user-{rows.user[index]}",
            session_id=None if rows.session is None else f"session-{rows.session[index]}",
        )
        domain = 0 if rows.domain is None else int(rows.domain[index])
        return request, Script(num_output, names[num_bytes:], request_key(index, domain))

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
