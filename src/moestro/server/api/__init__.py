"""The HTTP API of `moestro serve`: its paths and the handlers behind them."""
