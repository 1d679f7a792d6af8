"""Tables of one's own, in files or frames, as raw data."""
