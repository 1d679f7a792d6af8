"""Scores new examples with a run."""
