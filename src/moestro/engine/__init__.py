"""One rank: sequences, block pool, prefix cache, scheduler, fused executor. No torch, no clock, no sockets."""
