"""What `moestro place` does: reads a profile, asks policies, and shows and writes the answer."""
