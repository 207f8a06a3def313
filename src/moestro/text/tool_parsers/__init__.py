"""Parsers of tool calls, a file for each format."""
