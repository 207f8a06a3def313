"""The GPU kernels, in Triton's language. `functions` and `experts` launch them."""
