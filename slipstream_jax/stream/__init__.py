"""The only place where host and device meet."""
