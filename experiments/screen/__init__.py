"""What a person watches while a program runs."""
