"""Experts as all rooms see them: load, tables of copies, and moves between slots."""
