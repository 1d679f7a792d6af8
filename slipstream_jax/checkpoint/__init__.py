"""Checkpoints: row files, chains of them, saving and restoring."""
