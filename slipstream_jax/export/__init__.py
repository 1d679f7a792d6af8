"""Writes a trained model and its tables into a folder for `slip_serve`."""
