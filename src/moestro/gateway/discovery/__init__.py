"""Discovery: which engines there are, from a file, from DNS and from Kubernetes, while the router runs."""
