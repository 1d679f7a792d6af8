"""Packs raw files once, for many experiments."""
