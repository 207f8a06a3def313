"""What the router knows of engines' prefix caches, from KV events."""
