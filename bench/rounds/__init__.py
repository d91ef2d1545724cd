"""One round: one system trains one case in fresh processes."""
