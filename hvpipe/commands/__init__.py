"""The commands of `hvpipe`, one file each, and how they launch ranks."""
