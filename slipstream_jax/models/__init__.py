"""Flax models over embeddings; they never see a table."""
