"""Endpoint picker: chooses engines for Envoy and the gateways of Kubernetes, which carry the requests themselves."""
