"""Moestro: one scheduler for Mixture-of-Experts serving, from the cluster down to the expert."""

__version__ = "0.1.0"
