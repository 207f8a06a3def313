"""A rank's process: loop, channel, KV publisher, paced device."""
