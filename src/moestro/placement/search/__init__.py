"""The search for a better placement: starts, steps, limits and prices."""
