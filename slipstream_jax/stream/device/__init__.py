"""The rows that the device keeps, and programs that move rows there."""
