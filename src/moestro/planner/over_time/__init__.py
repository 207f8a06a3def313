"""Plans over the times of requests: the fewest GPUs that hold objectives over a day, and the load that breaks them."""
