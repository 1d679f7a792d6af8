"""Tells what several devices would hold, load and exchange, without them."""
