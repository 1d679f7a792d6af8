"""Rows in host memory: numba kernels and the host tables."""
