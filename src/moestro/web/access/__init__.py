"""Who may use a port, and how often: keys, limits, other origins."""
