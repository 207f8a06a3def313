"""Policies of level 2: ordering, batching, eviction and admission."""
