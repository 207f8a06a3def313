"""Numbers of examples: as many as found faults in each run, and all with `--hypothesis-profile=thorough`."""

from __future__ import annotations

from hypothesis import settings


def num_examples(usual: int, *, thorough: int) -> int:
    """The number of histories, seeds or events of a law under the profile of this run."""
    return thorough if settings.get_current_profile_name() == "thorough" else usual
