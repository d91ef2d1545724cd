"""How good the greedy plans are, and how long planning takes. Needs neither MPI nor TensorFlow."""
