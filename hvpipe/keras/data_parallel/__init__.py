"""Data-parallel training of Keras models: overlap modes, gradient buckets, the training step."""
