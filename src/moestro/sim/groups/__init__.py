"""Simulated groups of workers that share the experts of one network."""
