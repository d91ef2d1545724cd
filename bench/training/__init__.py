"""The models and data that benchmarks train."""
