"""Which rows changed since they were last saved, and their way out."""
