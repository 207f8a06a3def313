"""Shared parts of the HTTP servers: errors, keys, body limits, middleware, connections, start-up, life cycle."""
