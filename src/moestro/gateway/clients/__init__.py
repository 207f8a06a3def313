"""Connections of clients: what comes in, what the router itself answers, and what passes on."""
