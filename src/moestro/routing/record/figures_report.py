"""Figures that an engine reported, until the router needs them."""

from __future__ import annotations

import msgspec

from moestro.core.load_figures import LoadFigures


class FiguresReport(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Figures of an engine, and their time on the router's clock."""

    engine: int
    figures: LoadFigures
    as_of_ns: int

    def replaces(self, earlier: FiguresReport) -> bool:
        """Return whether an earlier report of the same engine is superfluous: this one is no older, and lacks nothing.

        An engine reports every step, so all figures are compared at once; each attribute would take as long as that.
        """
        if self.as_of_ns < earlier.as_of_ns:
            return False
        pairs = zip(msgspec.structs.astuple(self.figures), msgspec.structs.astuple(earlier.figures), strict=True)
        for now, before in pairs:  # noqa: SIM110  # a generator takes twice as long
            if now is None and before is not None:
                return False
        return True
