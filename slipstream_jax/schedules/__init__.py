"""Schedules: which examples run, in which order, and when rows are compared."""
