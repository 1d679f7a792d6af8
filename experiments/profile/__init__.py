"""Tells before training what each placement would move."""
