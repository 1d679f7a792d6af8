"""Rows as records of a file that ends with its process."""
