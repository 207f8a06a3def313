"""`moestro plan`: which deployment of a network on some GPUs serves a workload best, by simulation."""
