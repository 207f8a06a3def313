"""`moestro route`: an HTTP router in front of engines that run elsewhere."""
