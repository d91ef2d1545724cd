"""An evaluation: many rounds of many systems on many hosts, planned by a suite, and resumable."""
