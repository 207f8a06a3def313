"""Which engine gets a request: one small function each, by the name the field uses."""
