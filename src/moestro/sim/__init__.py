"""Virtual time: the real router, schedulers and policies driven by events, with priced devices in place of torch."""
