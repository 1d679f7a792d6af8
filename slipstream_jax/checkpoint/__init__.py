"""Rows on disk: files of rows, and checkpoints as chains of them."""
