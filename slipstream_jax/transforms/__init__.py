"""Transformations for embedding rows, in the form of optax."""
