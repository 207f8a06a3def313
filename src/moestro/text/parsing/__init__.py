"""Answers as parts: reasoning, calls of tools, structured output."""
