"""The models, data and optimizers that benchmarks train."""
