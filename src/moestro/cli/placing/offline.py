"""The offline profile of `moestro place`: random tokens through the network, against the profile of real traffic."""

from __future__ import annotations

from dataclasses import dataclass

from moestro.calibrate.shapes import RandomInput, profile_random_input
from moestro.config.checkpoint_directory import locate_model
from moestro.core.experts.expert_load import ExpertLoad, merge_sources
from moestro.errors import ConfigError
from moestro.model.settings import ModelSettings
from moestro.placement.load_window import PairOverlap, independent_pairs, pair_overlap
from moestro.placement.settings import ExpertLoadSettings
from moestro.wire.messages import ReadExperts, load_of
from moestro.worker.rank_builder import ExpertCollection
from moestro.workload.experts.expert_profile import ExpertProfile

_KV_BYTES = 1 << 28  # hundreds of tokens of any network


def offline_load(model: str, text: RandomInput) -> ExpertLoad:
    """Return the load of a model's experts under random tokens, from the collector that serves too.

    Args:
        model: A checkpoint directory, or a name.

    Raises:
        ConfigError: The model cannot be loaded, is dense, or its experts could not be counted.
    """
    collection = ExpertCollection(ExpertLoadSettings(expert_load_half_life=0))
    settings = ModelSettings(model=str(locate_model(model)), kv_cache_memory_bytes=_KV_BYTES)
    profile_random_input(settings, text, collection)
    merged = merge_sources([load_of(collection.report(ReadExperts(0, with_pairs=True)))])
    if merged is None:
        raise ConfigError(f"the experts of {model} could not be counted: {collection.error or 'no token visited any'}")
    return merged[0]


@dataclass(frozen=True, slots=True, eq=False)
class OfflineComparison:
    """How far random tokens show the pairs of experts of real traffic.

    Attributes:
        offline: Overlap of the profile's pairs with those under random tokens.
        independent: Overlap with the pairs that the profile's loads explain without any affinity.
    """

    offline: PairOverlap
    independent: PairOverlap

    def __str__(self) -> str:
        found, loads = self.offline, self.independent
        return (
            f"Pairs under random tokens: of the {found.num_compared} most frequent ones of a layer,"
            f" {found.mean:.0%} are those of the profile (worst layer {found.shared.min(initial=1.0):.0%},"
            f" by chance {found.by_chance:.1%}). The profile's loads alone explain {loads.mean:.0%}."
        )


def compare_offline(profile: ExpertProfile, offline: ExpertLoad) -> OfflineComparison:
    """Compare the pairs of a profile with those under random tokens.

    Raises:
        ConfigError: One of them has no pairs, or they are of different networks.
    """
    shapes = profile.load.tokens.shape[1:], offline.tokens.shape[1:]
    if shapes[0] != shapes[1]:
        sizes = [f"{layers} layers of {experts} experts" for layers, experts in shapes]
        raise ConfigError(f"the profile has {sizes[0]}, and the model of --offline {sizes[1]}")
    if profile.load.pairs is None or offline.pairs is None:
        raise ConfigError("--offline compares pairs of experts in consecutive layers, and the profile has none")
    loads = independent_pairs(profile.load)
    return OfflineComparison(
        offline=pair_overlap(profile.load.pairs, offline.pairs, *shapes[0]),
        independent=pair_overlap(profile.load.pairs, loads, *shapes[0]),
    )
