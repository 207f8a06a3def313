"""Loads drawn from seeds: arrivals, lengths, sessions, prompts."""
