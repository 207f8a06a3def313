"""Compiled libraries of C++ sources: their compilation, and the search for what is compiled."""
