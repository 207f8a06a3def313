"""Recorded load of experts, in all known forms."""
