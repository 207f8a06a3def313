"""The router as a shadow: it follows the traffic of the router in use, decides beside it, and sends nothing."""
