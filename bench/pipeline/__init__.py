"""The time of one pipeline step."""
