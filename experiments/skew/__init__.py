"""Measures how skewed data sets are."""
