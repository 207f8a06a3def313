"""Traces and records of requests, in all known forms."""
