"""Which device has which row, and what devices exchange in a step."""
