"""Monitoring of a rank and its host: CPU, memory, GPU, and the status that `hvpipe top` shows."""
