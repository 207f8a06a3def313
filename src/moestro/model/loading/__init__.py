"""From a checkpoint's files to a network: refusals, weights, defaults."""
