"""Evaluates a run's checkpoint on held-out examples, or on a file of them."""
