"""The decisions: each looks at a frozen view and answers. State and effects live elsewhere."""
