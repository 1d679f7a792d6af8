"""Finds towers of features that belong together, from what a run learned."""
