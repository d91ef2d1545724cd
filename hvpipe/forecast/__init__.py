"""Forecasts of a training step: pipelines, data parallel, and the choice between them."""
