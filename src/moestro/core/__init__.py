"""The words that every room shares: requests, units, plans, results, views, clocks, hashes. No torch, no sockets."""
