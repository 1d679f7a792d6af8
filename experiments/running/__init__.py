"""Parts of a run under way that no other program has."""
