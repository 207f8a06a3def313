"""A recorded load of experts with what is known of its origin."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moestro import __version__
from moestro.core.experts.expert_load import ExpertLoad, LayerPairs

CREATED_BY = f"moestro {__version__}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertProfile:
    """The load of a network's experts, as a file or a server's recording has it.

    Attributes:
        load: Load of the layers with experts.
        layers: Number of each of these layers in the network, from 0; dense layers count too.
        num_model_layers: Layers of the network, as far as the recording shows.
        model: Name of the network; empty means that the recording does not say it.
        origin: What was recorded, in words.
        notes: What the reader had to assume, a sentence each.
        created_by: Program that made the profile.
    """

    load: ExpertLoad
    layers: tuple[int, ...]
    num_model_layers: int
    model: str = ""
    origin: str = ""
    notes: tuple[str, ...] = ()
    created_by: str = CREATED_BY

    def __post_init__(self) -> None:
        if len(self.layers) != self.num_layers:
            raise ValueError(f"{len(self.layers)} layer numbers for {self.num_layers} layers")
        ordered = all(first < second for first, second in zip(self.layers, self.layers[1:], strict=False))
        if self.layers and not (ordered and self.layers[0] >= 0 and self.layers[-1] < self.num_model_layers):
            raise ValueError(f"layer numbers must grow, and be below {self.num_model_layers}")

    @property
    def num_sources(self) -> int:
        """Number of sources whose tokens are counted apart."""
        return int(self.load.tokens.shape[0])

    @property
    def num_layers(self) -> int:
        """Number of layers with experts."""
        return int(self.load.tokens.shape[1])

    @property
    def num_experts(self) -> int:
        """Number of logical experts of a layer."""
        return int(self.load.tokens.shape[2])


def without_dense_layers(profile: ExpertProfile) -> ExpertProfile:
    """Leave out layers in which no expert got a token: servers record a row of zeros for a dense layer."""
    return with_layers(profile, profile.load.total.sum(axis=1) > 0)


def with_layers(profile: ExpertProfile, kept: NDArray[np.bool_]) -> ExpertProfile:
    """Leave out all layers but those marked.

    Args:
        profile: A profile.
        kept: bool[layers].
    """
    if kept.all():
        return profile
    load, layers = profile.load, np.array(profile.layers, np.int64)
    return replace(
        profile,
        load=ExpertLoad(
            load.tokens[:, kept], load.variance[kept], load.activated[kept], load.num_steps, _pairs(load.pairs, kept)
        ),
        layers=tuple(layers[kept].tolist()),
    )


def _pairs(pairs: LayerPairs | None, kept: NDArray[np.bool_]) -> LayerPairs | None:
    """Keep pairs whose two layers stay neighbours."""
    if pairs is None:
        return None
    stays = kept[pairs.layer] & kept[np.minimum(pairs.layer + 1, len(kept) - 1)]
    number = np.cumsum(kept) - 1
    return LayerPairs(
        number[pairs.layer[stays]].astype(np.int32), pairs.expert[stays], pairs.next_expert[stays], pairs.count[stays]
    )
