"""Peers: connections to other routers, over which they exchange their requests (`routing/replication/`)."""
