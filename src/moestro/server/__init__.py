"""`moestro serve`: the API server, its client of the engines, and the supervisor of their processes."""
