"""Searches widths, depths, interactions and dims of a click model."""
