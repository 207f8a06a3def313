"""Settings trees, where each value came from, and what is read of the machine and of the user's files."""
