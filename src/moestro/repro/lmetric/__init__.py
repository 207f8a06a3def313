"""LMetric's experiment."""
