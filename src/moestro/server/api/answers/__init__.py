"""Answers of requests: generated, built in each API's form, whole and streamed."""
