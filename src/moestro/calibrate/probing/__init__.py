"""Calibrates a running server from outside: a design of probes, their estimates, and the files that they fill."""
