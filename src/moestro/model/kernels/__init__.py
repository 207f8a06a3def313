"""CPU kernels for bfloat16, and the exchange of a network's modules for them."""
