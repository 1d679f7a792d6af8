"""Lists runs, and lays them side by side on a page."""
