"""Settings trees, the origin of each value, facts about the machine, and processes for independent jobs."""
