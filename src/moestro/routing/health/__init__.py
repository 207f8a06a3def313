"""Health of engines: what counts against one, and when one is tried again."""
