"""Text of public logs for tests, and slow parsers as oracles."""
