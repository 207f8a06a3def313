"""Replication: what several routers exchange, so that each decides on the state of all. Callers pass the time.

A router numbers its own requests' operations in a journal and sends them to every peer. A peer applies them in order,
ignores what it has, requests what it lacks, and takes a snapshot where the journal no longer reaches back. There is no
leader and no common order: each router's requests are changed by its own operations alone.
"""
