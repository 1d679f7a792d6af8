"""Trains models that differ in their interactions, side by side."""
