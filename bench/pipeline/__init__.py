"""The step of a pipeline by placement, measured and simulated."""
