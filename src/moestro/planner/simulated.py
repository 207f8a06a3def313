"""A deployment on virtual time: one of its groups, serving a constant number of requests."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from moestro.core.clock import FOREVER_NS
from moestro.core.experts.expert_table import ExpertTable
from moestro.cost.collectives import all_reduce
from moestro.cost.drawn_step import Deployment
from moestro.cost.roofline import VLLM_HOST, HostCost, Roofline, RooflineSettings
from moestro.engine.settings import SchedulerSettings
from moestro.planner.divisions import GpuDivision
from moestro.planner.memory import MemoryUse, share_of
from moestro.planner.question import PlanQuestion
from moestro.planner.systems import STEP_POLICY, RunLimits
from moestro.sim.engine import Ranks
from moestro.sim.groups.baselines import LOCK_STEP, StepPricing, plain_replica
from moestro.sim.groups.group_builder import GroupSetup, deployment_of, make_group, pricing_of
from moestro.sim.groups.group_settings import GroupSettings
from moestro.sim.groups.lock_step_group import LockStepGroup
from moestro.sim.load.closed_loop import SPREAD_S, Observation, Replacing, run_observed
from moestro.sim.settings import PolicySettings, SimEngineSettings

_NO_HOST = HostCost(step_ns=0, sequence_ns=0)
_NO_LIMIT = 1 << 30
_MULTIPLE = 8  # limits on sequences are multiples of this
# Tokens of each request, in the mean, before a run is observed and while it is, and new requests in the meantime, if
# these take longer. 2 + 4 tokens are within 5 % of 4 + 6 for 1,200 requests in `async`, whose runs take long.
_ASYNC_PASSES, _PASSES = (2, 4), (3, 8)
_ASYNC_NEW_REQUESTS, _NEW_REQUESTS = 16, 64
_MOST_PASSES = 256  # steps are nearly alike with few requests


class SimulatedPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a deployment with a constant number of requests.

    Attributes:
        num_requests: requests in progress in all groups.
        seed: seed of the requests and of the experts that they visit.
        tokens_per_s: output tokens a second of all groups.
        itl_ms, itl_p99_ms: time between two tokens of an answer, mean and 99th percentile.
        ttft_ms, ttft_p99_ms: time from a request to its first token, mean and 99th percentile. NaN means that no
            request began in the run.
    """

    num_requests: int
    seed: int
    tokens_per_s: float
    itl_ms: float
    itl_p99_ms: float
    ttft_ms: float
    ttft_p99_ms: float


@dataclass(frozen=True, slots=True, eq=False)
class FittingDivision:
    """A deployment that fits, and the memory that it uses."""

    question: PlanQuestion
    division: GpuDivision
    memory: MemoryUse

    @property
    def num_engines(self) -> int:
        """Engines of all groups."""
        return self.division.num_groups * self.division.num_engines

    @property
    def most_requests(self) -> int:
        """Requests that fit the KV caches at once, in the mean."""
        return self.num_engines * int(self.memory.kv_tokens // self.question.lengths.mean_context)

    def limits(self, num_requests: int) -> RunLimits:
        """Limits under which this number of requests run at once.

        A step has at least two tokens for each sequence, as `async` mode needs, and what as many requests need in the
        mean: a token of each answer, and the prompts of new requests.
        """
        each = -(-num_requests // self.num_engines)
        max_num_seqs = -(-each // _MULTIPLE) * _MULTIPLE
        lengths = self.question.lengths
        tokens_each = max(1 + lengths.mean_prompt / lengths.mean_output, 2)
        num_tokens = max(self.question.settings.search.max_num_batched_tokens, math.ceil(max_num_seqs * tokens_each))
        return RunLimits(max_num_seqs=max_num_seqs, max_num_batched_tokens=num_tokens)

    def run(self, num_requests: int, seed: int) -> SimulatedPoint:
        """Simulate one of the groups with its part of the requests, and scale the figures to all groups."""
        lengths, num_groups = self.question.lengths, self.division.num_groups
        each = max(round(num_requests / num_groups), 1)
        is_async = self.division.mode == "async"
        warm, least = _ASYNC_PASSES if is_async else _PASSES
        num_new = _ASYNC_NEW_REQUESTS if is_async else _NEW_REQUESTS
        passes = max(least, min(round(num_new * lengths.mean_output / each), _MOST_PASSES))
        num_more = 1 + round(2 * each * (warm + passes) / lengths.mean_output) + each // 4
        # In `async`, requests that enter at once would go through the layers as one wave. In lock-step they do anyway.
        spread_s = min(SPREAD_S, self.question.settings.objectives.max_itl / 1e3) if is_async else 0.0
        load = lengths.steady_load(each, num_more, spread_s, seed)
        observation = Observation(FOREVER_NS, FOREVER_NS, first_tokens=warm * each, most_tokens=(warm + passes) * each)
        group = self.group(seed, self.limits(each * num_groups))
        results = run_observed([group], observation, load, Replacing(load), computes_prompts=True)
        itl_ms = np.array(observation.gaps_ns) / 1e6
        new = np.flatnonzero(results.arrival_ns >= 0)[load.num_first :]
        # A request without a token at the end has waited at least until then.
        first_ns = np.where(results.first_token_ns[new] >= 0, results.first_token_ns[new], observation.at_ns[-1])
        ttft_ms = (first_ns - results.arrival_ns[new]) / 1e6
        waits_ms = float(ttft_ms.mean()) if len(new) else 0.0
        # Little's law: requests in progress over the time of a request. Tokens over time would depend on how many of
        # the waves, in which requests gain tokens, end in so short a run.
        token_ms = (waits_ms + (lengths.mean_output - 1) * float(itl_ms.mean())) / lengths.mean_output
        return SimulatedPoint(
            num_requests=each * num_groups,
            seed=seed,
            tokens_per_s=num_groups * each / token_ms * 1e3,
            itl_ms=float(itl_ms.mean()),
            itl_p99_ms=float(np.percentile(itl_ms, 99)),
            ttft_ms=waits_ms if len(new) else float("nan"),
            ttft_p99_ms=float(np.percentile(ttft_ms, 99)) if len(new) else float("nan"),
        )

    def group(self, seed: int, limits: RunLimits) -> Ranks:
        """Build one group on virtual time."""
        bounds = SchedulerSettings(
            num_blocks=self.memory.num_blocks,
            block_size=self.question.settings.search.block_size,
            max_model_len=min(self.question.lengths.longest_requested, self.memory.kv_tokens),
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_num_queued_reqs=_NO_LIMIT,
            enable_prefix_caching=False,
        )
        if self.division.mode == "async":
            return make_group(self.setup(seed), self.policy, bounds, 0)
        deployment, pricing = self.lock_step(seed)
        return LockStepGroup(bounds, deployment, pricing)

    # --- parts ------------------------------------------------------------------------------------------------------

    def setup(self, seed: int) -> GroupSetup:
        """What `sim.group_builder` needs to know of a group, under a seed."""
        question, search = self.question, self.question.settings.search
        hardware = question.settings.hardware
        engines = SimEngineSettings(
            gpu=question.gpu.name,
            gpu_memory_utilization=hardware.gpu_memory_utilization,
            host_attention_us=search.host_attention_us,
            host_expert_us=search.host_expert_us,
        )
        group = GroupSettings(
            num_workers=self.division.gpus_per_group,
            workers_per_machine=hardware.gpus_per_machine,
            link_within=question.within.name,
            link_across=question.across.name,
        )
        return GroupSetup(
            group=group, engines=engines, cost=self.cost(), popularity=question.popularity(seed), seed=seed
        )

    @property
    def policy(self) -> PolicySettings:
        """The mode, as `moestro sim` has it."""
        return PolicySettings(
            mode=self.division.mode,
            num_expert_workers=self.division.num_expert_workers,
            attention_step_policy=STEP_POLICY,
            expert_step_policy=STEP_POLICY,
            launch_ahead=self.question.launch_ahead,
        )

    def cost(self) -> Roofline:
        """Prices of the stages of one GPU."""
        share = share_of(self.question, self.division)
        return Roofline(RooflineSettings(network=share, gpu=self.question.gpu, host=_NO_HOST))

    def lock_step(self, seed: int) -> tuple[Deployment, StepPricing]:
        """Return the workers of a mode in lock-step, and the prices of its steps."""
        cost = self.cost()
        grouped = cost.grouped_experts_ns if self.question.groups_experts and cost.network.experts else None
        if self.division.mode != "fused":
            setup, policy = self.setup(seed), self.policy
            deployment = deployment_of(setup, policy)
            return replace(deployment, host=VLLM_HOST, grouped_experts_ns=grouped), pricing_of(policy)
        exchange = all_reduce(self.question.within, self.question.network, self.division.gpus_per_group)
        if cost.network.experts is None:
            none = ExpertTable(0, np.zeros((1, cost.network.num_layers, 0), np.int32), 0, np.ones(1, np.bool_))
            return Deployment(
                cost=cost, gate=None, table=none, num_ranks=1, exchange=exchange, host=VLLM_HOST
            ), LOCK_STEP
        replica = plain_replica(cost, self.setup(seed).gate(), exchange)
        return replace(replica, host=VLLM_HOST, grouped_experts_ns=grouped), LOCK_STEP
