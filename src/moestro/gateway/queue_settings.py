"""Settings of the queue in front of the router, and of the class that engines get."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from moestro.core.clock import to_ns
from moestro.core.order_contract import OrderPolicy
from moestro.core.request import ServiceClass
from moestro.core.setting_checks import CheckedSettings, above, at_least
from moestro.engine.registry import ORDER_POLICIES
from moestro.errors import ConfigError
from moestro.routing.route_queue import NO_QUEUE, QueueRules
from moestro.routing.saturation import SaturationRules

_QUEUE = Group.create_ordered(
    "Queue",
    help="While every engine for a request is saturated, the request waits in the router and not in an engine.",
)
_HELP = (
    "Order policy of waiting requests (sjf:theta_age_s=2), or none: engines get every request at once."
    f"\n\n{ORDER_POLICIES.help_text()}"
)
# Fields and values by which engines know the classes.
_CLASS_FIELDS: dict[str, tuple[str, dict[ServiceClass, bytes]]] = {
    "vllm": ("priority", {ServiceClass.LS: b"0", ServiceClass.BE: b"1"}),
    "sglang": ("priority", {ServiceClass.LS: b"1", ServiceClass.BE: b"0"}),
    "moestro": ("service_class", {each: b'"%b"' % each.value.encode() for each in ServiceClass}),
}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class QueueSettings(CheckedSettings):
    """Settings of the queue."""

    queue_policy: Annotated[str, Parameter(group=_QUEUE, help=_HELP)] = NO_QUEUE
    queue_kv_usage: Annotated[float, above(0, at_most=1), Parameter(group=_QUEUE)] = 0.95
    "Fraction of its KV cache in use from which an engine is saturated; 1: when it is full."
    queue_waiting: Annotated[int, at_least(1), Parameter(group=_QUEUE)] = 4
    "Requests that may wait in an engine before it is saturated, so that it has work between two reads of /metrics."
    queue_ttft: Annotated[float | None, above(0), Parameter(group=_QUEUE)] = None
    "Predicted seconds to a first token from which an engine is saturated. Unset: its queue and its KV cache decide."
    queue_ttl: Annotated[float, above(0), Parameter(group=_QUEUE)] = 60.0
    "Longest wait in the queue, seconds, after which a request is refused."
    queue_max_requests: Annotated[int | None, at_least(1), Parameter(group=_QUEUE)] = 1024
    "Requests of one client (a key, or an address) that may wait."
    queue_max_tokens: Annotated[int | None, at_least(1), Parameter(group=_QUEUE)] = None
    "Prompt tokens of one client's waiting requests. Unset: no limit."
    queue_refusal: Annotated[Literal[429, 503], Parameter(group=_QUEUE)] = 429
    "Status of refusals by the queue, which have Retry-After."
    evict_best_effort: Annotated[bool, Parameter(group=_QUEUE)] = False
    (
        'Take a best-effort request (service_class "be") from its engine, once, if no byte of its answer has left and'
        " a latency-sensitive one waits. It is sent again later."
    )
    send_class: Annotated[Literal["none", "vllm", "sglang", "moestro"], Parameter(group=_QUEUE)] = "none"
    (
        "Write the class of a request into its body: priority 0 or 1 (vllm), 1 or 0 (sglang), or service_class"
        " (moestro). none leaves bodies as they are."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.has_queue:
            self.make_policy()

    @property
    def has_queue(self) -> bool:
        """Whether requests may wait in the router."""
        return self.queue_policy != NO_QUEUE

    def make_policy(self) -> OrderPolicy:
        """Return a new policy.

        Raises:
            ConfigError: there is no such policy, or none with these settings.
        """
        try:
            return ORDER_POLICIES.make(self.queue_policy)
        except ConfigError as error:
            raise ConfigError(f"--queue-policy: {error} (or none)") from None

    @property
    def rules(self) -> QueueRules:
        """Bounds of the queue."""
        return QueueRules(
            ttl_ns=to_ns(self.queue_ttl), max_requests=self.queue_max_requests, max_tokens=self.queue_max_tokens
        )

    @property
    def saturation(self) -> SaturationRules:
        """When an engine is saturated."""
        return SaturationRules(
            kv_usage=self.queue_kv_usage,
            num_waiting=self.queue_waiting,
            ttft_ns=None if self.queue_ttft is None else to_ns(self.queue_ttft),
        )

    @property
    def class_fields(self) -> dict[ServiceClass, dict[str, bytes | None]]:
        """Fields that the body of a request of each class gets; empty if bodies stay as they are."""
        if self.send_class == "none":
            return {}
        name, values = _CLASS_FIELDS[self.send_class]
        return {service_class: {name: value} for service_class, value in values.items()}
