"""Looks at machine, config and data before a long run."""
