"""Data sets as streams of batches."""
