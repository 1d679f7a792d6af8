"""Which way to train a config asks for."""
