"""Experiment configs, one `get_config()` each."""
