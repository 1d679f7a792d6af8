"""Trains recommendation models whose tables outgrow the accelerator."""
