"""How good plans are, and what planning large models costs. Needs neither MPI nor TensorFlow."""
