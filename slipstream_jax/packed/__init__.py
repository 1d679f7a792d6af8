"""Packed data sets: prepared once, read without being loaded."""
