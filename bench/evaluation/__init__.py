"""An evaluation: many rounds of many systems, budgeted and resumable."""
