"""Evaluates a checkpoint of a run."""
