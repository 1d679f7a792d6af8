"""Checks machine, config and data before a long run."""
