"""Publication of a rank's KV events: the encoding, the ports, and the listeners at them."""
