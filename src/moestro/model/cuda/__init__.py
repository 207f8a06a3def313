"""GPU kernels in Triton, and the exchange of a network's modules for them."""
