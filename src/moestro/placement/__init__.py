"""Level 4: which device holds a copy of which expert."""
