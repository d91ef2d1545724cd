"""Pipeline-parallel training of Keras models."""
