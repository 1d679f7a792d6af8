"""optax transformations on embedding rows."""
