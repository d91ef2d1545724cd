"""The time of one training step by overlap mode, and what hvpipe adds to plain Keras."""
