"""Programs: flags, one call, exit code."""
