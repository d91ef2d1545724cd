"""What surrounds the ranks: launcher, settings, folders, host, compiled libraries."""
