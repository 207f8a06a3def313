"""Settings trees, the origin of each value, and facts about the machine."""
