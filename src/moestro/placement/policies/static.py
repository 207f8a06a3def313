"""The policy that never moves an expert."""

from __future__ import annotations

from moestro.core.experts.expert_table import ExpertTable
from moestro.placement.registry import PLACE_POLICIES, PlaceView


@PLACE_POLICIES.register_function(
    "static", "leaves every expert where it is", source="vLLM and SGLang without load balancing"
)
def static(view: PlaceView) -> ExpertTable:
    """Return the present placement."""
    return view.table
