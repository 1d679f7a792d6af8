"""Writes a run's model and tables into a folder that `slip_serve` reads."""
