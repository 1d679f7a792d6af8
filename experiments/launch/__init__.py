"""Trains one config in several processes of a machine."""
