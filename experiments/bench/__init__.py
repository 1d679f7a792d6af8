"""Times the parts of a step, and this library beside others."""
