"""What Keras on PyTorch, Keras on JAX and hvpipe do in the same situations."""
