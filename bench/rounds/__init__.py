"""One round: one system trains one case in fresh processes; what it records, and how its steps are timed."""
