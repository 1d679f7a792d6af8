"""Writes synthetic clicks as Criteo's raw text."""
