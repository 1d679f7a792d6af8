"""Scorers: a click probability for every example before it is chosen."""
