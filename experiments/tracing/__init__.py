"""What a run does with its time, for a profiler's timeline."""
