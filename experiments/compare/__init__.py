"""Trains with and without skipping, side by side."""
