"""The commands of `hvpipe`: one file per command (`add_options`, `run`), and the launching of ranks."""
