"""`moestro route`: a router in front of engines that somebody else runs."""
