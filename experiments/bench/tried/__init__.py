"""Scorers that were tried and are not in the package."""
