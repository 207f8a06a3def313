"""The load of a simulation: arrivals, closed loops, and recorded requests."""
