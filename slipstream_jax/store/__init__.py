"""Stores of embedding rows on the host, in memory or on a disk."""
