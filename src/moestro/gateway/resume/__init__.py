"""Streams that go on elsewhere when their engine fails: which requests allow it, and the continuation's body."""
