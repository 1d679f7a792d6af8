"""Scores new examples with a finished run, or writes the rows of a table."""
