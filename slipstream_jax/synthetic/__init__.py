"""Streams that are made up, each example a function of its position."""
