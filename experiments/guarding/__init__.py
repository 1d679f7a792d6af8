"""What goes wrong in a run without an error: said, and mended if asked."""
