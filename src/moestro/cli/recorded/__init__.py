"""What `moestro explain` and `moestro replay` do: read a record or ask a server, and print."""
