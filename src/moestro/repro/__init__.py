"""Papers' experiments on virtual time: one frame, a folder for each paper."""
