"""All-reduce bandwidth."""
