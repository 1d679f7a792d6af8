"""What a program says of itself: --help, and what was meant by a wrong key."""
