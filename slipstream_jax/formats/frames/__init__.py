"""Users' own tables, in files or frames, as raw data."""
