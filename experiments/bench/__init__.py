"""Times the parts of a step, this library against others."""
