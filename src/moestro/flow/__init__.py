"""Tokens between stages: micro-queues, the token pool, and the executor that runs them by a step policy."""
