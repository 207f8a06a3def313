"""Traces of requests: contexts and spans, and their export by OpenTelemetry."""
