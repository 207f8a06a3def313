"""What HTTP servers share: errors, keys, body limits, middleware, connections, start-up, life cycle."""
