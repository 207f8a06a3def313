"""The only room with torch: loading, paged attention, experts, sampler, the torch device."""
