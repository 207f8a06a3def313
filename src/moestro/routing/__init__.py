"""Level 1, sans-IO: chooses an engine for each request."""
