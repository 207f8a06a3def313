"""The engines behind the router: connections, health, and their place in the fleet."""
