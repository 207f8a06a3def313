"""What work costs: roofline models per GPU and network shape, measured tables, and the device that answers by them.

Everything here runs on virtual time: prices are integer nanoseconds, and nobody sleeps or reads a clock.
"""
