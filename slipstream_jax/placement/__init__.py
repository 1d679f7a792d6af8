"""Which rows stay on the device between steps: pure plans over row ids."""
