"""Route policies of other systems, kept for comparison."""
