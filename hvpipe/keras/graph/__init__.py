"""A Keras model as a graph of layer calls, its stages, and their gradients."""
