"""What is decided before anything runs: which gradients travel together, and in which order."""
