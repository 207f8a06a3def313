"""Many engines, sans-IO: which one takes a request."""
