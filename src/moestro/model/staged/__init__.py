"""A network in stages, and the device that can stop between any two of them."""
