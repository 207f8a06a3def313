"""The API server's side of its engines: the client, the sockets, and what the engines report."""
