"""What work costs: roofline models for each GPU and network shape, measured tables, and priced devices.

Everything here runs on virtual time: prices are integer nanoseconds, and no code sleeps or reads a clock.
"""
