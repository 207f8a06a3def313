"""Placement policies, one or a family to a file."""
