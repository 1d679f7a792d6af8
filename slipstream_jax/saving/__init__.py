"""Checkpoints: everything that training is, on disk, whole or not at all."""
