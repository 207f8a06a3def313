"""Figures of a running router: metrics, log lines, the banner."""
