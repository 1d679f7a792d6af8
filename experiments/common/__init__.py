"""What the programs share: config to objects, the screen, the run's folder."""
