"""Exports a run for serving."""
