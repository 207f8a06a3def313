"""QLLM's figures again: one A100, Mixtral in 4 bits, latency-sensitive requests among best-effort ones."""
