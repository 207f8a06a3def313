"""Models without a server started by hand: `moestro.LLM`, `moestro run-batch` and `moestro chat`."""
