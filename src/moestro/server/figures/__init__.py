"""Figures of a running server: metrics, log lines, the record, the banner."""
