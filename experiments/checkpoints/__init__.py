"""Lists, copies and converts the checkpoints of runs."""
