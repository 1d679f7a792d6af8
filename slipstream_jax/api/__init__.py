"""The trainer that users hold, made of all other rooms."""
