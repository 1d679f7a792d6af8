"""Moves rows between host and device: the only room that does."""
