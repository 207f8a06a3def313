"""The processes of a server: how they start, how they are watched, and when they start again."""
