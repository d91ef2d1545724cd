"""The check of hvpipe to run on a machine with a GPU."""
