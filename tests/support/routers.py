"""Routers and engine tables for tests."""

from __future__ import annotations

import random

import numpy as np

from moestro.core.hashing import hash_blocks, hash_key
from moestro.core.load_figures import ROUTED_FIGURES
from moestro.core.request import Request, SamplingParams
from moestro.core.rng import Draws
from moestro.core.views import NEVER_NS, EngineTable, Figure
from moestro.routing.policy_contract import Choice, RoutePolicy, RouteView
from moestro.routing.registry import ROUTE_POLICIES
from moestro.routing.router import Router
from moestro.routing.settings import ANY_ENGINE, RouterSettings

BLOCK_SIZE = 16


def request(name="r", num_prompt_tokens=1, prompt=None, **fields) -> Request:
    """`prompt`: token ids, from which come length and block hashes."""
    if prompt is not None:
        tokens = np.asarray(prompt, np.int32)
        fields["block_hashes"] = hash_blocks(hash_key("m"), tokens, BLOCK_SIZE)
        num_prompt_tokens = len(tokens)
    fields = {"sampling": SamplingParams(), "arrival_ns": 0} | fields
    return Request(request_id=name, num_prompt_tokens=num_prompt_tokens, **fields)


def router(num_engines: int, policy: str | RoutePolicy, spec=ANY_ENGINE, **settings) -> Router:
    """A router whose engines are all routable."""
    policy = ROUTE_POLICIES.make(policy) if isinstance(policy, str) else policy
    made = Router(policy, RouterSettings(**{"block_size": BLOCK_SIZE} | settings))
    for _ in range(num_engines):
        made.set_routable(made.add_engine(spec), routable=True)
    return made


def table(num_engines: int | None = None, as_of_ns: int = 0, **columns) -> EngineTable:
    """Rows as given, all routable by default; a figure given is known as of `as_of_ns`, others never."""
    blank = EngineTable.blank(num_engines or len(next(iter(columns.values()))))
    fields = {name: getattr(blank, name) for name in EngineTable.__dataclass_fields__}
    for name, values in columns.items():
        if name in ROUTED_FIGURES:
            known = [value is not None for value in values]
            as_of = np.where(known, as_of_ns, NEVER_NS)
            fields[name] = Figure(np.array([value or 0 for value in values], np.float64), as_of)
        else:
            fields[name] = np.array(values, np.int64 if fields[name] is None else fields[name].dtype)
    return EngineTable(**fields)


def drawn_table(rng: random.Random, num_engines: int, **more) -> EngineTable:
    """Engines with some of the figures, for some rows too old or missing, and with the columns of `more`."""

    def drawn(low, high):
        return [rng.uniform(low, high) for _ in range(num_engines)]

    load = [rng.randrange(20) for _ in range(num_engines)]
    columns = {
        "num_in_flight": load,
        "num_prefilling": [rng.randrange(each + 1) for each in load],
        "prefill_tokens": [rng.randrange(9999) for _ in load],
        "reported_prefill_tokens": [rng.choice([np.inf, rng.randrange(9999)]) for _ in load],
        "num_kv_tokens": [rng.choice([1 << 50, rng.randrange(9000)]) for _ in load],
        "copy_price": drawn(0, 1),
    }
    if rng.random() < 0.5:
        columns |= {"speed": drawn(0.2, 3), "decode_speed": drawn(0.2, 3)}
    if rng.random() < 0.5:
        columns["kv_usage"] = [rng.choice([None, rng.random()]) for _ in load]
    if rng.random() < 0.5:
        columns["expert_pressure"] = [rng.choice([None, 2 * rng.random()]) for _ in load]
    return table(as_of_ns=rng.choice([0, 10**9]), **columns, **more)


def view(engines: EngineTable, hit_tokens=None, req=None, now_ns=0, decision_id=0, host_tokens=None) -> RouteView:
    hits = np.zeros(len(engines)) if hit_tokens is None else np.array(hit_tokens, np.float64)
    hosted = None if host_tokens is None else np.array(host_tokens, np.float64)
    return RouteView(req or request(), engines, hits, BLOCK_SIZE, now_ns, decision_id, host_tokens=hosted)


def decide(policy: RoutePolicy, engines: EngineTable, decision_id=0, **what) -> Choice:
    return policy.decide(view(engines, decision_id=decision_id, **what), Draws(0, decision_id))
