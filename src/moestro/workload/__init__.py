"""What comes in, and what became of it: traces, prompts, arrivals, reports. No clock, no sockets."""
