"""Compiled passes over all engines of a decision; the callers have NumPy's code for where it is not found."""
