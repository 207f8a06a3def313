"""Processes of `multiprocessing` that have loaded torch and transformers: forks of one that no test has used."""

from __future__ import annotations

import multiprocessing

LOADED = multiprocessing.get_context("forkserver")
LOADED.set_forkserver_preload(["moestro.worker.network_rank"])
