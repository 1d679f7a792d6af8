"""One thing to run, and what it leaves: cells, phases, curves."""
