"""Rows that changed since they were last saved, and snapshots of them."""
