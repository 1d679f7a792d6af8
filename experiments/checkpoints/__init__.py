"""Lists and copies the checkpoints of a run."""
