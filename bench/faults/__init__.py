"""Breaks ranks, links and disks on purpose, and checks how the job ends."""
