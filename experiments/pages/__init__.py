"""Pages that need nothing beside themselves: what is on them, and as what."""
