"""Trains, evaluates and reports one experiment."""
