"""`moestro calibrate`: measures what steps cost on this machine, for the simulator."""
