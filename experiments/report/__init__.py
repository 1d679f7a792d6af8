"""Lists runs, and writes a page of several side by side."""
