"""Routing policies: each chooses an engine for a request, under the name used in the field."""
