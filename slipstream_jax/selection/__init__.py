"""Selects the examples to train on and weighs them. Pure numpy."""
