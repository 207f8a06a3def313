"""Tables of micro-queues for tests of step policies: drawn at random, or written as the few queues that hold tokens."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from msgspec.structs import replace

from moestro.core.views import ATTENTION, BE, EMPTY_QUEUE_NS, LS, NUM_CLASSES, QueueTable

NUM_LAYERS, NUM_EXPERTS = 6, 4
ATTENTION_WORKER, EXPERT_WORKER, COLOCATED = KINDS = "attention worker", "expert worker", "colocated"


def table_of(n: np.ndarray, oldest_ns: np.ndarray | None = None) -> QueueTable:
    """Make a table in which all waiting tokens can run, int[classes, layers + 1, 1 + experts]; they came at time 0.

    All of them are decodes.
    """
    n = n.astype(np.int32)
    since = np.zeros(n.shape, np.int64) if oldest_ns is None else oldest_ns
    passed = np.zeros(n.shape, np.int64)
    waits = n > 0
    ages = np.where(waits, since, EMPTY_QUEUE_NS)
    of_experts = n[:, :, 1:].sum(axis=2, dtype=np.int32)
    return QueueTable(n, ages, passed, waits, of_experts, 1 << 20, np.zeros_like(of_experts))


def queues(
    tokens: Mapping[tuple[int, int], int],
    *,
    service_class: int = LS,
    since: Mapping[tuple[int, int], int] | None = None,
    num_layers: int = NUM_LAYERS,
    num_experts: int = NUM_EXPERTS,
) -> QueueTable:
    """Make a table from {(layer, group): tokens} of one class and {(layer, group): time of the oldest}."""
    n = np.zeros((NUM_CLASSES, num_layers + 1, 1 + num_experts), np.int32)
    oldest_ns = np.zeros(n.shape, np.int64)
    for (layer, group), count in tokens.items():
        n[service_class, layer, group] = count
    for (layer, group), time_ns in (since or {}).items():
        oldest_ns[service_class, layer, group] = time_ns
    return table_of(n, oldest_ns)


def random_table(
    rng: np.random.Generator, kind: str, num_layers: int | None = None, num_experts: int | None = None
) -> QueueTable:
    """Draw a table of one kind of worker with at least one runnable queue; small numbers, so that ties are frequent.

    Args:
        rng: source of the draws.
        kind: one of KINDS.
        num_layers, num_experts: sizes of the device; None means drawn.
    """
    num_layers = num_layers or int(rng.integers(1, 9))
    num_experts = num_experts or int(rng.integers(1, 5))
    while True:
        shape = (NUM_CLASSES, num_layers + 1, 1 if kind == ATTENTION_WORKER else 1 + num_experts)
        n = rng.integers(1, 6, shape) * (rng.random(shape) < 0.5)
        n[:, num_layers, 1:] = 0
        if kind == EXPERT_WORKER:
            n[:, :, ATTENTION] = 0
        view = table_of(n, rng.integers(0, 20, shape))
        can_run = view.runnable.copy()
        can_run[:, :, ATTENTION] &= rng.random(can_run.shape[:2]) < 0.8  # some attentions lack places
        if can_run.any():
            return replace(view, runnable=can_run, passed_ns=rng.integers(0, 30, shape) * (n > 0))


def of_classes(ls: Mapping[tuple[int, int], int], be: Mapping[tuple[int, int], int], passed_ns: int = 0) -> QueueTable:
    """Make a table of latency-sensitive and best-effort queues, {(layer, group): tokens}.

    Args:
        passed_ns: time for which all best-effort tokens were passed over, ns.
    """
    n = queues(ls).n + queues(be, service_class=BE).n
    return replace(table_of(n), passed_ns=np.where(n > 0, passed_ns, 0) * np.array([0, 1])[:, None, None])
