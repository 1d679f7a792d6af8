"""Rows that the device keeps, and the programs that move rows there."""
