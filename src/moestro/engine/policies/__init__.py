"""Level 2: ordering, batching, eviction and admission."""
