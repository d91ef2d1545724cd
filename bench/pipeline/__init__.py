"""The step of a pipeline by placement, measured and simulated; for one case, or a sweep over many."""
