"""Step policies: the tokens of the micro-queues that one device runs next."""
