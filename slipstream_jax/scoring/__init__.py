"""Scorers, which predict each example's click before examples are chosen."""
