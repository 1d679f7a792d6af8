"""Which rows have stopped changing; works on numpy and on JAX arrays."""
