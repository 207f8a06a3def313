"""The hardened front of every port: connections, framing, faults, and the life of the process."""
