"""Columns of any library become arrays: numbers, ids, and lists of ids."""
