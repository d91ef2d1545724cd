"""The flight recorders of a job that ended badly: read, and put into words."""
