"""Synthetic streams, in which each example is a function of its position."""
