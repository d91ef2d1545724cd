"""Forecasts of a training step: pipelines and data parallel."""
