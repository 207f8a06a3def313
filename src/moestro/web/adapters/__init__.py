"""Adapters: other APIs as translations of chat completions, without sockets, for the API server and the router."""
