"""What goes wrong in a run without an error: said, and where asked for mended."""
