"""The kernels, in Triton. What they compute is said there; `functions` launches them."""
