"""Structured output by llguidance: the check of a grammar in the API server, and the token masks of a rank."""
