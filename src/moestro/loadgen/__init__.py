"""The load generator: `moestro bench` against any OpenAI-compatible endpoint."""
