"""State, step, loop, metrics, evaluation and checkpoints."""
