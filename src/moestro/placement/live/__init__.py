"""Level 4 while a server or a simulation runs: when experts move, where to, and how; without clock and sockets."""
