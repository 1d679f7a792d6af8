"""Examples as their owners have them: columns by name, ids of their tables."""
