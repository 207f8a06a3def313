"""Workloads and their results: traces, prompts, arrivals, reports. No clock, no sockets."""
