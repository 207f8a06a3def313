"""The operators' paths of `moestro serve`, on a port of their own."""
