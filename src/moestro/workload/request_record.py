"""A server's record of what it answered: `moestro serve --record FILE` writes it, the simulator replays it.

One JSON object a line: first a `Header`, then a `RecordedRequest` for each request, in the order in which they ended.
No prompt and no answer is in it: blocks go by their keyed hashes, users by a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from moestro.core.request import Request, SamplingParams, ServiceClass
from moestro.core.script import Script
from moestro.errors import ConfigError
from moestro.workload.files import open_lines
from moestro.workload.rows import Int64s

FORMAT = "moestro-requests-1"


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The server under which they were recorded.

    Attributes:
        format: FORMAT.
        model: under which name.
        device: as its engines called it; that of a paced one begins with paced.
        num_engines, block_size, num_blocks, max_model_len: of it.
        kv_offloading_size: GiB of host memory of each engine, for the KV of preempted requests.
        limits: what each engine's scheduler was told, by the names of `SchedulerSettings`.
        stepping: in which pieces each engine computed, by the names of the flags; empty: step by step.
        route_policy: which engine got a request.
    """

    format: str = FORMAT
    model: str
    device: str
    num_engines: int
    block_size: int
    num_blocks: int
    max_model_len: int
    kv_offloading_size: float = 0.0
    limits: dict[str, object]
    stepping: dict[str, object] = {}
    route_policy: str


class RecordedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request that was answered whole. Times are the server's monotonic clock, nanoseconds.

    Attributes:
        request_id: the server's own.
        arrival_ns: at the front door.
        admitted_ns: when it was first given KV blocks.
        first_token_ns, last_token_ns: when they came back to the front door; 0: none was asked for.
        engine: which answered.
        num_prompt_tokens, num_output_tokens, num_hit_tokens: of prompt, answer, and prefix cache.
        max_tokens: what was asked for.
        block_hashes: of the prompt's full blocks, packed; base64 in the file.
        priority, service_class: as asked.
        user: a number for who asked; 0: nobody said.
    """

    request_id: str
    arrival_ns: int
    admitted_ns: int
    first_token_ns: int
    last_token_ns: int
    engine: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_hit_tokens: int
    max_tokens: int
    block_hashes: bytes
    priority: int = 0
    service_class: ServiceClass = ServiceClass.LS
    user: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class RequestRecord:
    """A record that was read. It is a workload: each request as it was, and its answer's length as its hidden future.

    The hashes of answers are not in it: a turn of a conversation finds the prompts of earlier ones in a replay's cache,
    not their answers.

    Attributes:
        header: see there.
        requests: in order of arrival.
    """

    header: Header
    requests: list[RecordedRequest]

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def arrival_ns(self) -> Int64s:
        """int64[n], from the first."""
        times: Int64s = np.array([request.arrival_ns for request in self.requests], np.int64)
        times -= times[0]
        return times

    def make(self, index: int, arrival_ns: int) -> tuple[Request, Script]:
        """Request `index` as it arrives then, and what came of it."""
        told = self.requests[index]
        request = Request(
            request_id=f"row-{index}",
            num_prompt_tokens=told.num_prompt_tokens,
            sampling=SamplingParams(max_tokens=told.max_tokens),
            arrival_ns=arrival_ns,
            block_hashes=told.block_hashes,
            priority=told.priority,
            service_class=told.service_class,
            user=f"user-{told.user}" if told.user else None,
        )
        return request, Script(max(told.num_output_tokens, 1))


def read_request_record(path: Path) -> RequestRecord:
    """The record in `path`.

    Raises:
        ConfigError: it cannot be read, or is no record; the text names the line.
    """
    decode = msgspec.json.Decoder(RecordedRequest).decode
    with open_lines(path) as lines:
        try:
            header = msgspec.json.decode(next(lines, ""), type=Header)
            if header.format != FORMAT:
                raise ConfigError(f"{path} is a record of format {header.format!r}; this version reads {FORMAT!r}")
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path} is no record of `moestro serve --record`: {error}") from None
        requests = []
        for number, line in enumerate(lines, 2):
            try:
                requests.append(decode(line))
            except msgspec.DecodeError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from None
    if not requests:
        raise ConfigError(f"{path} holds no requests")
    requests.sort(key=lambda request: (request.arrival_ns, request.request_id))
    return RequestRecord(header, requests)
