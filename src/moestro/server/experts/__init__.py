"""The experts of a running group: who holds them, how they move, and what routers learn of them."""
