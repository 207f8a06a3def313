"""Workers: several processes that serve one port as routers that are peers of each other, and one admin plane."""
