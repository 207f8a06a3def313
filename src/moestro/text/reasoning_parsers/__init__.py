"""Parsers of reasoning, a file for each format."""
