"""Lists and copies the checkpoints of runs."""
