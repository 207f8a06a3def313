"""The compiled kernel of the placement search; NumPy's code defines its results, and serves where it is absent."""
