"""Reads files of others: text in any encoding, and checkpoints as their files describe them, without torch."""
