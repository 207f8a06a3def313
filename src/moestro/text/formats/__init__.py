"""Formats in which models reason and call tools: a parser for each, registered by its name."""
