"""Policies of other routers, for comparison."""
