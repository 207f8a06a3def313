"""Routed experts: their computation, their weights in slots, and their exchange between workers."""
