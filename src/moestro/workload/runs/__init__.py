"""Outcomes of a run: records of requests, figures, objectives."""
