"""What an engine's scheduler did with its requests: events for people, and decisions that can be made again.

An engine reports them to the API server where a record or `moestro explain` wants them. Prompts and answers are absent.
"""

from __future__ import annotations

import msgspec


class PoliciesStarted(msgspec.Struct, frozen=True, tag=True):
    """An engine started with these policies, in text form. All earlier requests of the engine are gone.

    Attributes:
        observes: whether the order policy has a state, which admissions and ends change.
    """

    order: str
    evict: str
    observes: bool = False


class SequenceQueued(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A request waited when the scheduler looked at its queue.

    Attributes:
        place: requests that the order policy put before it; 0 means that it was next.
        num_waiting: requests in the queue, itself included.
        key: the order policy's keys of the request, the deciding one first; smaller is earlier. Ties go by arrival.
        ahead: the request right before it; "" means none.
        ahead_key: keys of that one.
        was_preempted: whether it waited because it had been preempted.
    """

    request_id: str
    now_ns: int
    place: int
    num_waiting: int
    key: dict[str, float] = {}
    ahead: str = ""
    ahead_key: dict[str, float] = {}
    was_preempted: bool = False


class SequenceAdmitted(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A waiting request was given KV blocks.

    Attributes:
        num_cached: tokens that need no computation, from the prefix cache or from host memory.
        key: as in `SequenceQueued`, at the time of the admission.
        num_before: requests that were admitted after this one was queued and before it.
        is_first: whether this is the first admission, and not one after a preemption.
        user, num_prompt_tokens: as in `core.views.Admitted`.
    """

    request_id: str
    now_ns: int
    num_cached: int = 0
    key: dict[str, float] = {}
    num_before: int = 0
    is_first: bool = True
    user: int = 0
    num_prompt_tokens: int = 0


class SequencePreempted(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A running request freed its KV blocks and waits again.

    Attributes:
        by: request for which it made way; its own id means that no other one could make way for it.
        is_for_class: whether it made way for a waiting latency-sensitive request.
        is_for_client: whether it made way because its client held more than its part. Otherwise KV blocks had run out.
        num_computed: tokens that were computed.
        keeps: whether the evict policy wanted its KV kept in host memory.
    """

    request_id: str
    now_ns: int
    by: str
    is_for_class: bool = False
    is_for_client: bool = False
    num_computed: int = 0
    keeps: bool = False


class BatchPassed(msgspec.Struct, frozen=True, tag=True):
    """Requests entered the device ahead of units in flight, which yield at the next checkpoint and keep their KV.

    Attributes:
        by: requests of the passing plan.
        passed: requests whose units were in flight; both lists may be cut.
    """

    now_ns: int
    by: tuple[str, ...]
    passed: tuple[str, ...]


class ExpertVisits(msgspec.Struct, frozen=True):
    """(Token, expert) pairs of one request by layer range and worker, while one version of the expert table was in use.

    Attributes:
        version: version of the table; the last one that is counted alone also has the pairs of later versions.
        ends: first layer behind each range; the first range begins at layer 0.
        num_pairs: pairs of each range, by worker.
    """

    version: int
    ends: tuple[int, ...]
    num_pairs: tuple[tuple[int, ...], ...]


class SequenceLeft(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A request left the engine, by its end or by an abort.

    Attributes:
        user, num_generated_tokens: as in `core.views.Left`.
        visits: devices of its experts, by version of the expert table; empty if they were not counted.
    """

    request_id: str
    user: int = 0
    num_generated_tokens: int = 0
    visits: tuple[ExpertVisits, ...] = ()


class OrderDecision(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The first waiting requests in the order policy's order, with the columns of `core.views.WaitingView`.

    Attributes:
        now_ns: time for which the policy sorted.
        num_waiting: requests in the queue, of which these are the first.
        num_uncached: None for a policy that does not read the prefix cache.
    """

    now_ns: int
    num_waiting: int
    request_ids: tuple[str, ...]
    arrival_ns: tuple[int, ...]
    num_prompt_tokens: tuple[int, ...]
    priority: tuple[int, ...]
    serial: tuple[int, ...]
    service_class: tuple[int, ...]
    user: tuple[int, ...]
    num_uncached: tuple[int, ...] | None = None


class EvictDecision(msgspec.Struct, frozen=True, tag=True):
    """A victim and the view from which the evict policy chose it, with the columns of `core.views.EvictView`.

    Attributes:
        row: the victim's row.
        keeps: whether its KV was to be kept in host memory.
    """

    request_id: str
    now_ns: int
    row: int
    keeps: bool
    order_rank: tuple[int, ...]
    num_computed_tokens: tuple[int, ...]
    service_class: tuple[int, ...]
    num_free_host_tokens: int


RequestEvent = SequenceQueued | SequenceAdmitted | SequencePreempted | BatchPassed
SchedulingEvent = RequestEvent | PoliciesStarted | SequenceLeft | OrderDecision | EvictDecision


class ExpertMove(msgspec.Struct, frozen=True):
    """An expert of a layer that moves between workers. A source of -1 is a new copy, a target of -1 a dropped one."""

    expert: int
    source: int
    target: int


class ExpertsMoved(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A group serves by a new version of its expert table.

    Attributes:
        now_ns: time at which the API server knew.
        version: version of the table from then on.
        layers: layers in which slots changed.
        num_moves: copies that came, went or moved, in all layers.
        moves: some of them, as (layer, move).
        dead: workers that the table declares dead.
    """

    now_ns: int
    version: int
    layers: tuple[int, ...] = ()
    num_moves: int = 0
    moves: tuple[tuple[int, ExpertMove], ...] = ()
    dead: tuple[int, ...] = ()
