"""What is compiled beside the step: the start, and rows on the host."""
